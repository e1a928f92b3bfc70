"""Detached requests, which run without a listener: their handles, and calls that name a request by its id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Protocol, Unpack

from ...shared.errors import RequestNotFoundError, ValidationError
from ...shared.messages.deltas import Delta
from ...shared.params.kinds import RequestOutputKind
from ...shared.params.pooling import PoolingParams
from ...shared.params.sampling import SamplingParams
from ...shared.values.names import check_name
from ...shared.values.shown import shown
from ..inputs.options import RequestOptions, SharedOptions, check_linger
from ..inputs.prompt import Prompt, as_prompts, params_of_each
from ..inputs.prompt_lists import naming, numbered
from ..requests.fan_out import child_ids, merge, possible_child_ids
from ..requests.output_stream import collect, outputs_of
from ..requests.queue_entry import Outgoing
from ..requests.single_requests import FollowOptions
from ..results import RequestOutput
from .core import ClientCore

Params = SamplingParams | PoolingParams | None


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


class DetachedRequests(ClientCore):
    """The part of the client that enqueues detached requests, and ends or follows requests of any client."""

    async def submit(self, prompt: Prompt, params: Params = None, **options: Unpack[RequestOptions]) -> RequestHandle:
        """Enqueue a detached request, which runs without a listener, and return its handle.

        With ``PoolingParams`` the prompt is pooled, and ``(await handle.result()).pooled`` is the result.

        Raises: as ``stream``, before anything was enqueued.
        """
        outgoing = await self._builder.build_detached(prompt, params, options)
        await self._requests.submit(outgoing)
        first = outgoing[0].request
        return RequestHandle(self, first.model, first.request_id, prompt, n=len(outgoing))

    async def add_request(
        self, request_id: str, prompt: Prompt, params: Params = None, **options: Unpack[SharedOptions]
    ) -> RequestHandle:
        """``submit`` a request under an id that the caller chooses, as in vLLM's engines.

        If a request with this id exists, attach to it instead of enqueuing another.
        """
        return await self.submit(prompt, params, request_id=request_id, **options)

    async def submit_many(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestHandle]:
        """Enqueue many detached requests in one batch, in order; ``params`` is one for all prompts or one each.

        If one is refused, those that were enqueued are cancelled.

        Raises: as ``submit``; and ``ValidationError`` for a ``request_id``, since all requests would share it.
        """
        if options.get("request_id") is not None:
            raise ValidationError("submit_many takes no request_id: each request needs its own")
        prompt_list = as_prompts(prompts)
        each = params_of_each(params, len(prompt_list))
        card = await self._builder.checked_card(options)
        built: list[list[Outgoing]] = []
        for prompt, name, chosen in zip(prompt_list, numbered("prompt", prompt_list), each, strict=True):
            with naming(name):
                built.append(self._builder.detached(prompt, chosen, options, card))
        if built:
            await self._requests.submit([answer for outgoing in built for answer in outgoing])
        return [
            RequestHandle(self, outgoing[0].request.model, outgoing[0].request.request_id, prompt, n=len(outgoing))
            for prompt, outgoing in zip(prompt_list, built, strict=True)
        ]

    async def resolve_model(self, model: str | None = None) -> str:
        """Return the name of the model that serves requests for ``model``; None means the only model.

        Raises:
            UnknownModelError: no worker has ever served it.
        """
        return (await self._builder.card(model)).model

    async def handle(self, request_id: str, *, model: str | None = None, n: int = 1) -> RequestHandle:
        """Return a handle on a request that was enqueued earlier, here or elsewhere, with ``n`` answers."""
        return RequestHandle(self, await self.resolve_model(model), request_id, n=n)

    async def cancel(self, request_id: str, *, model: str | None = None, n: int = 1) -> None:
        """End a request, all ``n`` answers, with finish_reason "cancelled", in any state. Does nothing after its end.

        Raises:
            RequestNotFoundError: the request is unknown, or its result has expired.
        """
        card = await self._builder.card(model)
        ids, broker = child_ids(request_id, n), self._requests.broker(card.model)
        for answer_id, state in zip(ids, await asyncio.gather(*map(broker.cancel, ids)), strict=True):
            if state is None:
                raise RequestNotFoundError(
                    f"request {shown(answer_id)} of model {shown(card.model)} is unknown or has expired"
                )

    async def abort(self, request_id: str | Iterable[str], *, model: str | None = None, internal: bool = False) -> None:
        """End one request or many, of any client, with finish_reason "cancelled". Unknown ids are ignored.

        Args:
            internal: end only these answers: "x" is the first answer of request "x", "x~2" the third. By default all
                answers of a request are ended.
        """
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for each_id in request_ids:
            check_name("request_id", each_id)
        broker = self._requests.broker((await self._builder.card(model)).model)

        async def answer_ids(first_id: str) -> list[str]:
            """Return the ids of all answers of a request. Most requests have one, and one command shows that."""
            others = [] if internal else possible_child_ids(first_id)
            num_known = await broker.count_known(others) if others else 0
            return [first_id, *(others if num_known else [])]

        ids = [child for children in await asyncio.gather(*map(answer_ids, request_ids)) for child in children]
        await asyncio.gather(*map(broker.cancel, ids))

    def follow(self, model: str, request_ids: Sequence[str], each: Sequence[FollowOptions]) -> AsyncGenerator[Delta]:
        """Iterate over the answers of a request that is already enqueued; see ``RequestHandle``."""
        self._builder.check_open()
        pairs = zip(request_ids, each, strict=True)
        return merge([self._requests.follow(model, request_id, **options) for request_id, options in pairs])
