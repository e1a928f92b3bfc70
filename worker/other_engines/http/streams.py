"""Asks the server, in a thread of its own: each call's answers come in order, those of all calls in one queue.

A call that is closed closes its connection, which is how both servers are told to stop. Each call has a connection of
its own: one that is kept may end between two calls, which would look like the server's death.
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

from ....shared.values.urls import mask_url

CONNECT_TIMEOUT_S = 5.0
HEALTH_INTERVAL_S = 1.0
# Of one look. A server that computes may be slow to answer; one that is gone is so at once.
HEALTH_TIMEOUT_S = 10.0
MAX_UNHEALTHY_LOOKS = 3
_MAX_BODY_BYTES = 4096
_LINE_END = re.compile(rb"\r\n|\r|\n")


@dataclass(frozen=True)
class Answer:
    """A whole answer, or one event of a stream."""

    call_id: int
    content: dict[str, Any]


@dataclass(frozen=True)
class Refused:
    """The server has answered with another status than 200."""

    call_id: int
    status: int
    content: bytes


@dataclass(frozen=True)
class Closed:
    """Nothing more comes; ``failure`` says why, if that was not in order."""

    call_id: int
    failure: str = ""


Event = Answer | Refused | Closed


def client_options(url: str) -> dict[str, Any]:
    """Of any client of the server at ``url``; proxies of the environment are for other hosts."""
    return {"base_url": url, "trust_env": False, "limits": httpx.Limits(max_keepalive_connections=0)}


class ServerStreams:
    """Calls of the server at ``url``.

    Args:
        on_lost: called in the thread, once, with the reason, when the server is gone while ``watch`` looks.
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

    def ask(self, path: str, body: dict[str, Any], *, is_streamed: bool) -> int:
        """Begin a call; returns its id, by which its events are known."""
        call_id = next(self._call_ids)
        self._loop.call_soon_threadsafe(self._begin, call_id, path, body, is_streamed)
        return call_id

    def cancel(self, call_id: int) -> None:
        """End a call; events that have come already may still be taken."""
        self._loop.call_soon_threadsafe(self._cancel, call_id)

    def take(self, wait_s: float) -> list[Event]:
        """Return what has come, waiting up to ``wait_s`` for the first."""
        try:
            events = [self._events.get(timeout=wait_s)]
        except queue.Empty:
            return []
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    def watch(self, path: str) -> None:
        """Look at the server's health from now on."""
        self._loop.call_soon_threadsafe(self._begin_watch, path)

    def close(self) -> None:
        """End all calls and the thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
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
        self._watching = self._loop.create_task(self._watch(path))

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
            self._events.put(Closed(call_id, f"its answer is no JSON object: {error}"))
        else:
            self._events.put(Closed(call_id))

    async def _read_events(self, call_id: int, response: httpx.Response) -> None:
        """Report the data lines of server-sent events. Both servers write the data of an event as one line.

        Lines are split here, since httpx splits them inside of JSON strings, too: at U+2028, for example.
        """
        rest = b""
        async for piece in response.aiter_bytes():
            *lines, rest = _LINE_END.split(rest + piece)
            for line in lines:
                self._take_line(call_id, line)
        self._take_line(call_id, rest)

    def _take_line(self, call_id: int, line: bytes) -> None:
        kind, _, content = line.partition(b":")
        content = content.strip()
        if kind == b"data" and content != b"[DONE]":
            self._events.put(Answer(call_id, _decoded(content)))
        elif kind == b"error":
            self._events.put(Answer(call_id, {"error": _decoded(content)}))

    async def _watch(self, path: str) -> None:
        num_unhealthy, finding = 0, ""
        while num_unhealthy < MAX_UNHEALTHY_LOOKS:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            try:
                response = await self._client.get(path, timeout=HEALTH_TIMEOUT_S)
            except httpx.ConnectError as error:
                finding = f"nobody answers at {self._shown_url}: {error}"
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
