"""Requests that a caller drives like vLLM's ``LLMEngine``: it adds requests, and calls ``step`` for their outputs.

Engines step by themselves; a step here only returns the outputs that have arrived. The requests are detached: they
outlive the process that added them, and a restarted script that adds the same ids attaches to them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Unpack

from ...shared.errors import ValidationError
from ...shared.messages.deltas import Delta
from ...shared.params.kinds import RequestOutputKind
from ...shared.params.pooling import PoolingParams
from ...shared.params.sampling import SamplingParams
from ...shared.process.waiting import wait_at_most
from ...shared.values.shown import shown
from ..client import Client
from ..client_parts.detached import Params, RequestHandle
from ..inputs.options import SharedOptions
from ..inputs.prompt import Prompt
from ..results import PoolingRequestOutput, RequestOutput, output_of
from .llm_control import LLMControl

StepOutput = RequestOutput | PoolingRequestOutput


class SteppedRequests:
    """Requests that were added here, and their outputs that no step has returned. Use it in the loop of ``client``."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._following: dict[str, asyncio.Task[None]] = {}
        # Model of each followed request, so that ``abort`` needs no model for it.
        self._models: dict[str, str] = {}
        self._outputs: deque[tuple[str, StepOutput | Exception]] = deque()
        self._has_changed = asyncio.Event()

    @property
    def is_unfinished(self) -> bool:
        """Whether a step has outputs to return, now or later."""
        return bool(self._following or self._outputs)

    async def add(self, request_id: str, prompt: Prompt, params: Params, **options: Unpack[SharedOptions]) -> None:
        """Enqueue a request and follow it.

        Raises:
            ValidationError: a request of this id was added here and is not finished.
            and as ``Client.add_request``.
        """
        if request_id in self._following or any(output_id == request_id for output_id, _ in self._outputs):
            raise ValidationError(
                f"request {shown(request_id)} was added already and is not finished; give each request its own id"
            )
        handle = await self.client.add_request(request_id, prompt, params, **options)
        self._models[request_id] = handle.model
        if isinstance(params, PoolingParams):
            outputs = _pooled(handle, prompt)
        else:
            kind = params.output_kind if isinstance(params, SamplingParams) else RequestOutputKind.DELTA
            outputs = handle.stream_outputs(kind)
        self._following[request_id] = asyncio.create_task(self._follow(request_id, outputs))

    async def step(self, timeout_s: float | None) -> list[StepOutput]:
        """Wait for outputs and return those since the last step; an empty list if no request is unfinished.

        Raises:
            Exception: the error by which a request ended; later outputs are returned by the next step.
        """
        while not self._outputs and self._following:
            self._has_changed.clear()
            if not await wait_at_most(timeout_s, self._has_changed.wait()):
                return []
        outputs: list[StepOutput] = []
        while self._outputs:
            request_id, output = self._outputs[0]
            if isinstance(output, Exception):
                if outputs:
                    break
                self._outputs.popleft()
                output.add_note(f"request {request_id}")
                raise output
            outputs.append(output)
            self._outputs.popleft()
        return outputs

    async def abort(self, request_ids: Iterable[str], model: str | None) -> None:
        """End requests, and drop the outputs of those that were added here."""
        aborted_ids = set(request_ids)
        # First, because a request that could not be aborted is still followed.
        ids_of_model: dict[str | None, list[str]] = {}
        for request_id in sorted(aborted_ids):
            ids_of_model.setdefault(model or self._models.get(request_id), []).append(request_id)
        for name, ids in ids_of_model.items():
            await self.client.abort(ids, model=name)
        followed = [task for request_id in aborted_ids if (task := self._following.pop(request_id, None)) is not None]
        for task in followed:
            task.cancel()
        await asyncio.gather(*followed, return_exceptions=True)
        self._outputs = deque(item for item in self._outputs if item[0] not in aborted_ids)
        for request_id in aborted_ids:
            self._models.pop(request_id, None)
        self._has_changed.set()

    async def leave(self) -> None:
        """Stop following. The requests continue to run."""
        tasks = list(self._following.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, request_id: str, outputs: AsyncGenerator[StepOutput]) -> None:
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    self._add_output(request_id, output)
        except Exception as error:
            # Also an error of Redis, such as a right that its user lacks: the caller waits for the end of the request.
            self._add_output(request_id, error)
        finally:
            # Another request of this id may have been added since this one was aborted.
            if self._following.get(request_id) is asyncio.current_task():
                del self._following[request_id]
                self._models.pop(request_id, None)
            self._has_changed.set()

    def _add_output(self, request_id: str, output: StepOutput | Exception) -> None:
        self._outputs.append((request_id, output))
        self._has_changed.set()


class SteppedLLM(LLMControl):
    """The part of ``LLM`` in which a caller adds requests and reads their outputs step by step."""

    _stepped: SteppedRequests | None = None

    def add_request(
        self, request_id: str, prompt: Prompt, params: Params = None, **options: Unpack[SharedOptions]
    ) -> str:
        """Enqueue a request whose outputs ``step`` returns, and return its id; see ``Client.add_request``.

        It is detached: it continues if this process dies, and adding it again attaches to it. ``params.output_kind``
        selects the content of each output: the new part (``DELTA``, the default), all so far (``CUMULATIVE``), or the
        whole output once (``FINAL_ONLY``).

        Raises:
            ValidationError: a request of that id was added here and is not finished.
            PenstockError: any error of ``Client.submit``.
        """

        async def add() -> None:
            await self._stepped_requests().add(request_id, prompt, params, **options)

        self.call(add())
        return request_id

    def step(self, timeout_s: float | None = None) -> list[StepOutput]:
        """Wait for outputs of the requests that were added here, and return those since the last step.

        Waits at most ``timeout_s``. The list is empty after that time, and if all requests are finished. A pooling
        request has one ``PoolingRequestOutput``, any other request ``RequestOutput``s.

        Raises:
            PenstockError: a request ended with an error; a note of the error has its id. Other requests continue.
        """

        async def step() -> list[StepOutput]:
            return await self._stepped_requests().step(timeout_s)

        return self.call(step())

    def has_unfinished_requests(self) -> bool:
        """Return whether ``step`` has outputs to return, now or later. For the requests of all clients, see
        ``get_num_unfinished_requests``.
        """
        stepped = self._own_process_requests(self._client)
        return stepped is not None and stepped.is_unfinished

    def abort_request(self, request_id: str | Iterable[str], *, model: str | None = None) -> None:
        """End requests; ``step`` returns no more of their outputs. Unknown ids are ignored."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)

        async def abort() -> None:
            await self._stepped_requests().abort(request_ids, model)

        self.call(abort())

    def _own_process_requests(self, client: Client) -> SteppedRequests | None:
        """Return the requests that were added through ``client``; None in a forked child, which has another client."""
        stepped = self._stepped
        return stepped if stepped is not None and stepped.client is client else None

    def _stepped_requests(self) -> SteppedRequests:
        client = self._client
        stepped = self._own_process_requests(client)
        if stepped is None:
            stepped = self._stepped = SteppedRequests(client)
        return stepped


async def _pooled(handle: RequestHandle, prompt: Prompt) -> AsyncGenerator[PoolingRequestOutput]:
    """Yield the one output of a pooling request."""
    last: Delta | None = None
    async with aclosing(handle.stream()) as deltas:
        async for delta in deltas:
            last = delta
    yield output_of(handle.request_id, handle.model, prompt, last)
