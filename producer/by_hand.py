"""Requests that a caller drives as it would an engine: add some, and take what has come since, again and again.

Engines step by themselves; a step here is only the taking. The requests are detached: they outlive who added them, and
a script that is started again with the same ids goes on with what there is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import aclosing
from typing import Unpack

from ..shared.errors import PenstockError, ValidationError
from ..shared.params.kinds import RequestOutputKind
from ..shared.params.sampling import SamplingParams
from ..shared.shown import shown
from .client import Client
from .detached import Params
from .handle import RequestHandle
from .inputs.options import SharedOptions
from .inputs.prompt import Prompt
from .results.outputs import RequestOutput


class RequestsByHand:
    """The requests that were added here, and what of them was not taken yet. For one event loop, that of ``client``."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._following: dict[str, asyncio.Task[None]] = {}
        # Of those that are followed; ``abort`` needs no model for them.
        self._models: dict[str, str] = {}
        self._come: deque[tuple[str, RequestOutput | PenstockError]] = deque()
        self._something = asyncio.Event()

    @property
    def is_unfinished(self) -> bool:
        """Whether a step has, or will have, something to give."""
        return bool(self._following or self._come)

    async def add(self, request_id: str, prompt: Prompt, params: Params, **options: Unpack[SharedOptions]) -> None:
        """Enqueue a request and follow it.

        Raises:
            ValidationError: one of that id was added here, and is not finished.
            and as ``Client.add_request``.
        """
        if request_id in self._following or any(known == request_id for known, _ in self._come):
            raise ValidationError(
                f"request {shown(request_id)} was added already and is not finished; give each request its own id"
            )
        handle = await self.client.add_request(request_id, prompt, params, **options)
        self._models[request_id] = handle.model
        kind = params.output_kind if isinstance(params, SamplingParams) else RequestOutputKind.DELTA
        self._following[request_id] = asyncio.create_task(self._follow(handle, kind))

    async def step(self, timeout_s: float | None) -> list[RequestOutput]:
        """Return what has come since the last step, once there is something; nothing if no request is unfinished.

        Raises:
            PenstockError: how the next request in line ended; those after it come with the next step.
        """
        while not self._come and self._following:
            self._something.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._something.wait()
            except TimeoutError:
                return []
        taken: list[RequestOutput] = []
        while self._come:
            request_id, one = self._come[0]
            if isinstance(one, PenstockError):
                if taken:
                    break
                self._come.popleft()
                one.add_note(f"request {request_id}")
                raise one
            taken.append(one)
            self._come.popleft()
        return taken

    async def abort(self, request_ids: Iterable[str], model: str | None) -> None:
        """End requests, and give nothing more of those that were added here."""
        wanted = set(request_ids)
        # First: a request that could not be aborted goes on being followed.
        ids_of_model: dict[str | None, list[str]] = {}
        for request_id in sorted(wanted):
            ids_of_model.setdefault(model or self._models.get(request_id), []).append(request_id)
        for name, ids in ids_of_model.items():
            await self.client.abort(ids, model=name)
        followed = [task for request_id in wanted if (task := self._following.pop(request_id, None)) is not None]
        for task in followed:
            task.cancel()
        await asyncio.gather(*followed, return_exceptions=True)
        self._come = deque(item for item in self._come if item[0] not in wanted)
        for request_id in wanted:
            self._models.pop(request_id, None)
        self._something.set()

    async def leave(self) -> None:
        """Follow nothing any more; the requests run on."""
        tasks = list(self._following.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, handle: RequestHandle, kind: RequestOutputKind) -> None:
        request_id = handle.request_id
        try:
            async with aclosing(handle.stream_outputs(kind)) as outputs:
                async for output in outputs:
                    self._tell(request_id, output)
        except PenstockError as error:
            self._tell(request_id, error)
        finally:
            # One of the same name may have been added since this one was aborted.
            if self._following.get(request_id) is asyncio.current_task():
                del self._following[request_id]
                self._models.pop(request_id, None)
            self._something.set()

    def _tell(self, request_id: str, one: RequestOutput | PenstockError) -> None:
        self._come.append((request_id, one))
        self._something.set()
