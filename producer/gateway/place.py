"""Place of a waiting request in the queue: headers of its response, and comments in its stream.

Redis is asked only about a request that has no output after some time. So a request that starts at once costs no call.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from ...shared.errors import PenstockError
from ...shared.process.log import get_logger
from ...shared.queue.stats import ModelState, RequestStatus
from .. import Client
from ..openai.errors import RETRY_AFTER_S
from ..sse import COMMENT
from .http import gateway_of

POSITION_HEADER, START_HEADER = "x-penstock-queue-position", "x-penstock-estimated-start"
STATE_HEADER = "x-penstock-model-state"
_STATE_WORDS = {
    ModelState.LOADING: "is loading",
    ModelState.ASLEEP: "is asleep",
    ModelState.UNLOADED: "is not loaded",
}
# Comments come four times until the estimated start, within the limits of a ``Place``.
_COMMENTS_PER_WAIT = 4
_ASK_TIMEOUT_S = 10.0
T = TypeVar("T")
log = get_logger(__name__)


class Place:
    """The place of one request.

    Args:
        model: model or adapter; None for the only model.
        wait_s: how long output is awaited before Redis is asked; also the shortest time between two comments.
        every_s: longest time between two comments.

    Attributes:
        headers: the position, the state of the model and, if known, the seconds until the start; empty if the request
            did not wait.
    """

    def __init__(self, client: Client, model: str | None, request_id: str, *, wait_s: float, every_s: float) -> None:
        self._client = client
        self._model = model
        self._request_id = request_id
        self._wait_s, self._every_s = wait_s, every_s
        self.headers: dict[str, str] = {}

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``, which runs the request. Cancelling this cancels it."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task], timeout=self._wait_s)
            if not task.done():
                self.headers = _headers(await self._status())
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def around(self, pieces: AsyncGenerator[bytes], *, has_preamble: bool = False) -> AsyncGenerator[bytes]:
        """Iterate over ``pieces``, and close it at the end. Add comments with the place while the request waits.

        The first piece comes after ``wait_s`` at the latest, and ``headers`` are known then.

        Args:
            has_preamble: whether the first pieces come before the request has output.
        """
        loop = asyncio.get_running_loop()
        due_at, is_first, is_waiting = loop.time() + self._wait_s, True, True
        upcoming = asyncio.ensure_future(anext(pieces))
        async with aclosing(pieces):
            try:
                while is_waiting:
                    await asyncio.wait([upcoming], timeout=due_at - loop.time())
                    if upcoming.done() and (loop.time() < due_at or upcoming.exception() is not None):
                        yield await upcoming
                        upcoming = asyncio.ensure_future(anext(pieces))
                        is_waiting = has_preamble or not is_first
                    else:
                        status = await self._status()
                        headers = _headers(status)
                        is_waiting = status is None or status.position is not None
                        if is_first:
                            self.headers = headers
                        if is_first or headers:
                            yield _comment(headers) + await self._words(status)
                        due_at = loop.time() + self._interval_s(status)
                    is_first = False
                yield await upcoming
            except StopAsyncIteration:
                return
            finally:
                upcoming.cancel()
                await asyncio.gather(upcoming, return_exceptions=True)
            async for piece in pieces:
                yield piece

    async def _words(self, status: RequestStatus | None) -> bytes:
        """Return a comment for people who wait for a model that is not loaded, or nothing."""
        if status is None or status.position is None or status.readiness is None:
            return b""
        words = _STATE_WORDS.get(status.readiness.state)
        if words is None:
            return b""
        model = await self._client.resolve_model(self._model)
        start = "" if status.estimated_start_s is None else f", about {max(1, math.ceil(status.estimated_start_s))} s"
        return f": model {model} {words}{start}, position {status.position}\n".encode()

    def _interval_s(self, status: RequestStatus | None) -> float:
        if status is None or status.estimated_start_s is None:
            return self._every_s
        return min(self._every_s, max(self._wait_s, status.estimated_start_s / _COMMENTS_PER_WAIT))

    async def retry_after_s(self) -> float:
        """Return the estimated wait of the request's band, for a caller whose request has expired."""
        status, stats = await self._status(), await self._ask(self._client.queue_stats)
        bands = [] if status is None or stats is None else [band for band in stats.bands if band.band == status.band]
        return next((band.estimated_wait_s for band in bands if band.estimated_wait_s is not None), RETRY_AFTER_S)

    async def _status(self) -> RequestStatus | None:
        """Return the state of the request; None also if it is not in the queue yet."""
        return await self._ask(lambda model: self._client.status(self._request_id, model))

    async def _ask(self, call: Callable[[str], Awaitable[T]]) -> T | None:
        """Return the result of a call for the model; None if it is refused, or Redis does not answer in time."""
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                return await call(await self._client.resolve_model(self._model))
        except (PenstockError, TimeoutError) as error:
            log.debug("place_unknown", error=str(error))
            return None


def place_of(request: Request, model: str | None, request_id: str) -> Place:
    """Return the place of a request in the queue, which the response to the HTTP request reports."""
    gateway = gateway_of(request)
    settings = gateway.settings
    place = Place(gateway.client, model, request_id, wait_s=settings.status_wait_s, every_s=settings.keep_alive_s)
    request.state.place = place
    tenant = request.state.identity.tenant
    request.state.read_rate_limits = partial(gateway.rate_limits.headers_for, model, tenant)
    return place


def _headers(status: RequestStatus | None) -> dict[str, str]:
    if status is None or status.position is None:
        return {}
    headers = {POSITION_HEADER: str(status.position)}
    if status.readiness is not None:
        headers[STATE_HEADER] = status.readiness.state
    if status.estimated_start_s is not None:
        headers[START_HEADER] = f"{status.estimated_start_s:.1f}"
    return headers


def _comment(headers: dict[str, str]) -> bytes:
    fields = " ".join(f"{name}={value}" for name, value in headers.items())
    return f": {fields}\n".encode() if fields else COMMENT
