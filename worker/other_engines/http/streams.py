"""Make calls of the server in a separate thread. The events of all calls arrive in one queue, those of a call in order.

Cancelling a call closes its connection, on which both servers stop computing it. Each call has a separate connection,
since a kept one may be closed between two calls, which would look like the server's death.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from ....shared.values.shown import mask_url

CONNECT_TIMEOUT_S = 5.0
HEALTH_INTERVAL_S = 1.0
# Timeout of one check. A busy server may answer slowly; the loss of a server is noticed immediately.
HEALTH_TIMEOUT_S = 10.0
MAX_UNHEALTHY_CHECKS = 3
_MAX_BODY_BYTES = 4096
_LINE_END = re.compile(rb"\r\n|\r|\n")


@dataclass(frozen=True)
class Answer:
    """A whole response, or one event of a stream."""

    call_id: int
    content: dict[str, Any]


@dataclass(frozen=True)
class Refused:
    """A response with a status other than 200."""

    call_id: int
    status: int
    content: bytes


@dataclass(frozen=True)
class Closed:
    """The end of a call; ``failure`` is the reason if it failed."""

    call_id: int
    failure: str = ""


Event = Answer | Refused | Closed


def client_options(url: str) -> dict[str, Any]:
    """Return the options of a client of the server at ``url``. Proxies of the environment are not used."""
    return {"base_url": url, "trust_env": False, "limits": httpx.Limits(max_keepalive_connections=0)}


class ServerStreams:
    """Calls of the server at ``url``.

    Args:
        on_lost: called once in the thread, with the reason, when health checks find that the server is lost.
    """

    def __init__(self, url: str, on_lost: Callable[[str], None]) -> None:
        self._shown_url = mask_url(url)
        self._on_lost = on_lost
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._watching: asyncio.Task[None] | None = None
        self._client = httpx.AsyncClient(**client_options(url), timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S))
        self._thread = threading.Thread(target=self._loop.run_forever, name="server-streams", daemon=True)
        self._thread.start()

    def start(self, path: str, body: dict[str, Any], *, is_streamed: bool) -> int:
        """Start a call. Returns its id, which its events have."""
        call_id = next(self._call_ids)
        self._loop.call_soon_threadsafe(self._begin, call_id, path, body, is_streamed)
        return call_id

    def cancel(self, call_id: int) -> None:
        """Cancel a call; events that have arrived already remain in the queue."""
        self._loop.call_soon_threadsafe(self._cancel, call_id)

    def pop_events(self, wait_s: float) -> list[Event]:
        """Return the events that have arrived, waiting up to ``wait_s`` for the first."""
        try:
            events = [self._events.get(timeout=wait_s)]
        except queue.Empty:
            return []
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    def watch(self, path: str) -> None:
        """Check the server's health periodically from now on."""
        self._loop.call_soon_threadsafe(self._begin_watch, path)

    def close(self) -> None:
        """Cancel all calls and end the thread."""
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = [*self._calls.values(), *([self._watching] if self._watching is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def _begin(self, call_id: int, path: str, body: dict[str, Any], is_streamed: bool) -> None:
        task = self._loop.create_task(self._follow(call_id, path, body, is_streamed))
        self._calls[call_id] = task
        task.add_done_callback(lambda _: self._calls.pop(call_id, None))

    def _cancel(self, call_id: int) -> None:
        if call_id in self._calls:
            self._calls[call_id].cancel()

    def _begin_watch(self, path: str) -> None:
        self._watching = self._loop.create_task(self._watch_health(path))

    async def _follow(self, call_id: int, path: str, body: dict[str, Any], is_streamed: bool) -> None:
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    content = (await response.aread())[:_MAX_BODY_BYTES]
                    self._events.put(Refused(call_id, response.status_code, content))
                elif is_streamed:
                    await self._read_events(call_id, response)
                else:
                    self._events.put(Answer(call_id, _decoded(await response.aread())))
        except httpx.HTTPError as error:
            self._events.put(Closed(call_id, f"{type(error).__name__}: {error}".rstrip(": ")))
        except msgspec.MsgspecError as error:
            self._events.put(Closed(call_id, f"its response is not a JSON object: {error}"))
        else:
            self._events.put(Closed(call_id))

    async def _read_events(self, call_id: int, response: httpx.Response) -> None:
        """Queue the data lines of server-sent events. Both servers write the data of an event in one line.

        Lines are split here, since httpx splits them within JSON strings too, for example at U+2028.
        """
        rest = b""
        async for piece in response.aiter_bytes():
            *lines, rest = _LINE_END.split(rest + piece)
            for line in lines:
                self._queue_line(call_id, line)
        self._queue_line(call_id, rest)

    def _queue_line(self, call_id: int, line: bytes) -> None:
        kind, _, content = line.partition(b":")
        content = content.strip()
        if kind == b"data" and content != b"[DONE]":
            self._events.put(Answer(call_id, _decoded(content)))
        elif kind == b"error":
            self._events.put(Answer(call_id, {"error": _decoded(content)}))

    async def _watch_health(self, path: str) -> None:
        num_unhealthy, finding = 0, ""
        while num_unhealthy < MAX_UNHEALTHY_CHECKS:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            try:
                response = await self._client.get(path, timeout=HEALTH_TIMEOUT_S)
            except httpx.ConnectError as error:
                finding = f"no server answers at {self._shown_url}: {error}"
                break
            except httpx.HTTPError as error:
                num_unhealthy += 1
                finding = f"{path} at {self._shown_url}: {type(error).__name__} {error}"
            else:
                is_healthy = response.status_code == httpx.codes.OK
                num_unhealthy = 0 if is_healthy else num_unhealthy + 1
                finding = f"{path} at {self._shown_url} answers {response.status_code}"
        self._on_lost(finding)


def _decoded(content: bytes) -> dict[str, Any]:
    return msgspec.json.decode(content, type=dict[str, Any])
