"""A handle on a request that runs without a listener."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from ..shared.errors import ValidationError
from ..shared.messages.deltas import Delta
from ..shared.params.kinds import RequestOutputKind
from ..shared.values.shown import shown
from .inputs.options import check_linger
from .requests.fan_out import child_ids
from .requests.output_stream import collect, outputs_of
from .requests.single_requests import FollowOptions
from .results.outputs import RequestOutput


class Follower(Protocol):
    """The part of the client that a handle uses: it knows requests by their id."""

    def follow(self, model: str, request_ids: Sequence[str], each: Sequence[FollowOptions]) -> AsyncGenerator[Delta]:
        """Iterate over the answers of a request that is already enqueued, each with its options in ``each``."""
        ...

    async def cancel(self, request_id: str, *, model: str | None = None, n: int = 1) -> None:
        """End a request, all ``n`` answers."""
        ...


class RequestHandle:
    """Result, stream and cancellation of a detached request; returned by ``Client.submit`` and ``Client.handle``.

    A handle holds no connection: any process that knows model, request_id and ``n`` can create one. With ``n`` > 1 it
    acts on all answers; ``child`` returns a handle on one.
    """

    __slots__ = ("_child_ids", "_client", "_prompt", "model", "n", "request_id")  # submit_many creates thousands

    def __init__(self, client: Follower, model: str, request_id: str, prompt: object = None, *, n: int = 1) -> None:
        self._client = client
        self.model = model
        self.request_id = request_id
        self.n = n
        self._prompt = prompt
        self._child_ids = child_ids(request_id, n)

    def child(self, child: int) -> RequestHandle:
        """Return a handle on one answer as a separate request: its output has index 0, its deltas ``child`` 0."""
        if isinstance(child, bool) or not isinstance(child, int) or not 0 <= child < self.n:
            raise ValidationError(f"child must be in [0, {self.n}), got {shown(child)}")
        return RequestHandle(self._client, self.model, self._child_ids[child], self._prompt)

    async def result(self) -> RequestOutput:
        """Wait for the end and return the whole output.

        Raises:
            EngineDeadError: it was enqueued with ``fail_fast``, and the last engine died before it ended.
            PoisonRequestError: ``max_deliveries`` engines died on it; it is parked in the dead letter.
            RequestFailedError: the engine refused or failed the request (or a ``ValidationError`` of the engine).
            RequestNotFoundError: the request is unknown, or its result has expired.
        """
        return await collect(self.stream(), self.model, self.request_id, self._prompt, n=self.n)

    def stream(self, after: int | Sequence[int] = -1, *, linger_s: float | None = None) -> AsyncGenerator[Delta]:
        """Iterate over the deltas after token ``after`` (-1: from the first). Leaving early cancels nothing.

        Any number of readers may stream a request, at any time until its result expires. With ``n`` > 1 the stream
        merges all answers, and ``after`` has one index per answer; ``child(c).stream(after=...)`` streams a single
        answer.

        Args:
            linger_s: if the request was streamed with this option: how long it stays available for another reader after
                this one leaves.

        Raises:
            ValidationError: ``after`` is not an index, or has not one index per answer; or ``linger_s`` is invalid.
        """
        each = list(after) if isinstance(after, Sequence) else [after] * (self.n if after == -1 else 1)
        for index in each:
            if isinstance(index, bool) or not isinstance(index, int) or index < -1:
                raise ValidationError(f"after must be a token index, at least -1, got {shown(index)}")
        if len(each) != self.n:
            raise ValidationError(f"after={after} must have one index for each of {self.n} answers")
        check_linger(linger_s)
        return self._client.follow(
            self.model, self._child_ids, [{"after": index, "linger_s": linger_s} for index in each]
        )

    def replay(self, borders: Sequence[int], *, linger_s: float | None = None) -> AsyncGenerator[Delta]:
        """Iterate over all deltas again, such that a delta begins at token ``borders[child]`` of each answer.

        A reader that keeps state from token to token can so reach the state of another reader: the borders are the
        ``next_index`` of deltas that the other reader received. ``linger_s``: as in ``stream``.
        """
        check_linger(linger_s)
        if len(borders) != self.n:
            raise ValidationError(f"borders must be {self.n} token indexes, one for each answer, got {len(borders)}")
        return self._client.follow(
            self.model, self._child_ids, [{"border": border, "linger_s": linger_s} for border in borders]
        )

    def stream_outputs(self, kind: RequestOutputKind = RequestOutputKind.DELTA) -> AsyncGenerator[RequestOutput]:
        """Iterate over the outputs as ``Client.stream_outputs`` does, from the first token. Leaving early cancels
        nothing.
        """
        return outputs_of(self.stream(), kind, self.model, self.request_id, self._prompt, n=self.n)

    async def cancel(self) -> None:
        """End the request with finish_reason "cancelled". Does nothing after its end or when repeated."""
        await self._client.cancel(self.request_id, model=self.model, n=self.n)
