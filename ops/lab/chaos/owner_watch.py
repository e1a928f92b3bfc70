"""Observation of claims and records through a server's MONITOR.

MONITOR prints commands in the order of their execution, and after a script the commands of that script. So a record
counts as written when its script pushes it onto a log, regardless of the reply to the caller. This is independent of
the scripts under test, so a wrong script cannot hide.

A lost connection is opened again. Commands in between are not observed. So later observations must not contradict
earlier ones, and nothing is concluded from missing ones.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import re
from collections.abc import Mapping
from typing import Any

from redis.asyncio.connection import AbstractConnection

from ....shared.broker import SCRIPTS, Script
from ....shared.broker.writes import NUM_WRITE_ARGS
from ....shared.keys import ModelKeys
from ....shared.process.log import get_logger
from ....shared.redis_access.link import (
    LOST,
    RETRY_PAUSE_S,
    close_connection,
    heed_cancellation,
    make_pool,
    open_connection,
)
from ....shared.redis_access.replies import deliver_replies
from .owners import Owners

CATCH_UP_TIMEOUT_S = 900.0
_WORD = re.compile(rb'"((?:[^"\\]|\\.)*)"')
# Time, database, and the client's address or "lua".
_HEAD = re.compile(rb"[\d.]+ \[\d+ (lua|[^\]]*)\] ")

log = get_logger(__name__)


class OwnerWatch:
    """Reporter of a model's claims and records to ``owners``; call ``run`` concurrently with the load.

    Args:
        scripts: scripts whose calls are observed.
    """

    def __init__(self, url: str, keys: ModelKeys, owners: Owners, scripts: Mapping[str, Script] = SCRIPTS) -> None:
        self._pool = make_pool(url)
        self.owners = owners
        self._names = {scripts[name].sha.encode(): name for name in NUM_WRITE_ARGS}
        self._log_key, self._request_key = keys.log("").encode(), keys.request("").encode()
        self._server = b""
        # Requested writes of the current script: request to epoch, index, index after it.
        self._asked: dict[bytes, tuple[int, int, int]] = {}
        self._marks: dict[bytes, asyncio.Event] = {}
        self.is_watching = asyncio.Event()

    async def run(self) -> None:
        """Watch until cancelled, whichever server the URL leads to."""
        while True:
            try:
                connection = await open_connection(self._pool)
            except LOST:
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            try:
                await self._watch_commands(connection)
            except LOST as error:
                log.info("owner_watch_lost", error=str(error))
            finally:
                self.is_watching.clear()
                await close_connection(connection)

    async def catch_up(self, commands: Any) -> None:
        """Return when all has been seen that was done before; ``commands`` is a connection for a command."""
        mark = f"chaos-mark-{len(self._marks)}"
        passed = self._marks[mark.encode()] = asyncio.Event()
        async with asyncio.timeout(CATCH_UP_TIMEOUT_S):
            while not passed.is_set():
                await self.is_watching.wait()
                await commands.execute("ECHO", mark)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _watch_commands(self, connection: AbstractConnection) -> None:
        server = await self._ask_server(connection, "INFO", "server")
        match = re.search(rb"run_id:(\w+)", server)
        if match and match[1] != self._server:
            self.owners.forget()
            self._server = match[1]
        self._asked = {}
        # A part of the first line may arrive with the reply.
        await heed_cancellation(connection.send_command("MONITOR"))
        await deliver_replies(connection, self.saw)

    @staticmethod
    async def _ask_server(connection: AbstractConnection, *words: str) -> Any:
        await heed_cancellation(connection.send_command(*words))
        return await heed_cancellation(connection.read_response())

    def saw(self, line: Any) -> None:
        """Handle one line of MONITOR. Most of the thousands are irrelevant and must be skipped quickly."""
        if isinstance(line, Exception):
            raise line
        head = _HEAD.match(line) if isinstance(line, bytes) else None
        if not head:
            if line == b"OK":  # of MONITOR
                self.is_watching.set()
            return
        if head[1] != b"lua":
            self._saw_command(line, head.end())
        elif line.startswith(b'"RPUSH" "' + self._log_key, head.end()):
            self._saw_push(line)
        elif line.startswith(b'"HSET" "' + self._request_key, head.end()) and b'"claimed"' in line:
            self._saw_state(line)

    def _saw_command(self, line: bytes, start: int) -> None:
        self._asked = {}
        if line.startswith(b'"EVAL', start):
            words = _WORD.findall(line, start)
            sha = words[1] if words[0] == b"EVALSHA" else _sha(words[1])
            name = self._names.get(sha)
            if name is not None:
                self._asked = _asked(name, words[5:])
        elif line.startswith((b'"FLUSHALL"', b'"FLUSHDB"'), start):
            self.owners.forget()
        elif line.startswith(b'"ECHO"', start):
            mark = self._marks.get(_WORD.findall(line, start)[1])
            if mark is not None:
                mark.set()

    def _saw_push(self, line: bytes) -> None:
        key = _WORD.findall(line)[1]
        question = self._asked.pop(key[len(self._log_key) :], None)
        if question is not None:
            self.owners.wrote(key[len(self._log_key) :].decode(), *question)

    def _saw_state(self, line: bytes) -> None:
        key, *pairs = _WORD.findall(line)[1:]
        fields = dict(zip(pairs[::2], pairs[1::2], strict=False))
        if fields.get(b"state") == b"claimed" and b"engine" in fields:
            request_id = key[len(self._request_key) :].decode()
            self.owners.claimed(request_id, int(fields[b"epoch"]), fields[b"engine"].decode())


def _asked(name: str, words: list[bytes]) -> dict[bytes, tuple[int, int, int]]:
    """Return the requested writes of a call. ``append`` has the index after it, other scripts the number of tokens."""
    writes: dict[bytes, tuple[int, int, int]] = {}
    for start in range(0, len(words), NUM_WRITE_ARGS[name]):
        request_id, epoch, index, end = words[start : start + 4]
        writes[request_id] = (int(epoch), int(index), int(end) if name == "append" else int(index) + int(end))
    return writes


def _sha(text: bytes) -> bytes:
    plain, _ = codecs.escape_decode(text)
    return hashlib.sha1(plain, usedforsecurity=False).hexdigest().encode()
