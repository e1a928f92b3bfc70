"""Converts the deltas of a request's answers to ``RequestOutput``s in vLLM's shapes."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from ...shared.errors import ClientClosedError
from ...shared.messages.deltas import Delta
from ...shared.messages.outcome import Usage
from ...shared.params.kinds import RequestOutputKind
from ...shared.values.shown import shown
from ..results import RequestOutput, completion, final_output, prompt_logprobs_of, usage_of


async def outputs_of(
    deltas: AsyncGenerator[Delta], kind: RequestOutputKind, model: str, request_id: str, prompt: object, *, n: int
) -> AsyncGenerator[RequestOutput]:
    """Yield outputs of ``kind`` from the ``deltas`` of ``n`` answers. Closes ``deltas`` at the end.

    Raises:
        ClientClosedError: the deltas end before each answer has ended.
        and errors of ``deltas``.
    """
    async with aclosing(deltas):
        if kind == RequestOutputKind.FINAL_ONLY:
            yield await collect(deltas, model, request_id, prompt, n=n)
            return
        assembly = OutputAssembly(kind, model, request_id, prompt, n=n)
        async for delta in deltas:
            yield assembly.add(delta)
        if not assembly.finished:
            raise ClientClosedError(f"request {shown(request_id)} was left without an end")


class OutputAssembly:
    """Converts each delta to an output of kind ``DELTA`` or ``CUMULATIVE``."""

    def __init__(self, kind: RequestOutputKind, model: str, request_id: str, prompt: object, *, n: int) -> None:
        self._is_cumulative = kind == RequestOutputKind.CUMULATIVE
        self._model = model
        self._request_id = request_id
        self._prompt = prompt
        self._num_open = n
        self._wholes: dict[int, Delta] = {}
        self._logprobs: dict[int, float] = {}
        self._usages: list[Usage] = []

    @property
    def finished(self) -> bool:
        """Whether all answers have ended."""
        return self._num_open == 0

    def add(self, delta: Delta) -> RequestOutput:
        """Return the output for ``delta``."""
        child = delta.child
        shown_delta = delta
        if delta.finished:
            self._num_open -= 1
            self._usages += [] if delta.usage is None else [delta.usage]
        if self._is_cumulative:
            whole = self._wholes.get(child)
            shown_delta = self._wholes[child] = delta if whole is None else whole.followed_by(delta)
        answer = completion(child, shown_delta)
        if delta.logprobs or child in self._logprobs:
            total = math.fsum((self._logprobs.get(child, 0.0), *(token.logprob for token in delta.logprobs)))
            answer.cumulative_logprob = self._logprobs[child] = total
        return RequestOutput(
            request_id=self._request_id,
            model=self._model,
            prompt=self._prompt,
            outputs=[answer],
            usage=usage_of(self._usages) if self.finished else None,
            finished=self.finished,
            prompt_logprobs=prompt_logprobs_of(shown_delta),
        )


def in_kind(deltas: AsyncGenerator[Delta], kind: RequestOutputKind) -> AsyncGenerator[Delta]:
    """Return the stream of one answer in the shape of ``SamplingParams.output_kind``. Closes ``deltas`` at the end."""
    return deltas if kind == RequestOutputKind.DELTA else _wholes(deltas, kind)


async def _wholes(deltas: AsyncGenerator[Delta], kind: RequestOutputKind) -> AsyncGenerator[Delta]:
    whole: Delta | None = None
    async with aclosing(deltas):
        async for delta in deltas:
            whole = delta if whole is None else whole.followed_by(delta)
            if kind == RequestOutputKind.CUMULATIVE or whole.finished:
                yield whole


async def collect(
    deltas: AsyncIterator[Delta], model: str, request_id: str, prompt: object, *, n: int = 1
) -> RequestOutput:
    """Merge a stream of ``n`` answers into the final output."""
    wholes: dict[int, Delta] = {}
    async for delta in deltas:
        whole = wholes.get(delta.child)
        if whole is None:
            wholes[delta.child] = delta
        else:
            whole.extend(delta)
    if len(wholes) < n:
        raise ClientClosedError(f"request {shown(request_id)} was left without an end")
    return final_output(request_id, model, prompt, [wholes[child] for child in range(n)])
