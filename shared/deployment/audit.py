"""The audit log of a deployment: entries that the changing calls themselves write.

``audited`` wraps a change. It writes one entry when the change is done or has failed, so an entry has the result. The
``Actor`` of the current task made the change: a command, a page and a web app each set it once.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import importlib
import os
import socket
import time
from collections.abc import AsyncGenerator, Generator
from contextvars import ContextVar
from typing import Any

import msgspec
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from ..connection import CommandConnection
from ..errors import PenstockError
from ..keys import Keys
from ..messages import WIRE_VERSION
from ..process.log import get_logger
from .records import UNREADABLE, decode_record

# Older entries are dropped.
MAX_ENTRIES = 10_000
MAX_DETAIL_CHARS = 200
MAX_READ = 1000
# Channels of operators; all others are apps.
_OPERATORS = ("cli", "dashboard", "top")
# Between the old and the new value of a changed field.
ARROW = " → "
# A change does not wait for a Redis that is unavailable, or full.
PATIENCE_S = 5.0

log = get_logger(__name__)


class ActorSource(enum.StrEnum):
    """Source of the actor's name. No environment variable counts, since anyone can set one."""

    PROCESS = "process user"
    OPERATOR_KEY = "operator key"
    PROXY = "proxy header"
    APP = "app"
    # The dashboard admits anyone who reaches it.
    NOBODY_ASKED = "not asked"


class Actor(msgspec.Struct, frozen=True, kw_only=True):
    """The actor of a change: name of a person or program, channel ("cli", "client", "dashboard"), and host.

    Args:
        source: how the name is known; by default a web app sets it.
    """

    name: str
    via: str
    address: str = ""
    source: ActorSource = ActorSource.APP


class AuditEntry(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """A change. JSON in Redis, so that people can read it; new fields are only appended and have a default.

    Args:
        at: Unix time in seconds by the clock of the actor's host.
        action: name of the change, such as "queue.pause".
        target: the changed model, tenant or request.
        details: details of the change, as text.
        result: "ok", or the code of the error.
        entry_id: its id in the stream; set when it is read.
        source: how ``actor`` is known, one of ``ActorSource``. Empty in entries of older versions, whose commands and
            clients believed the variable USER.
        redis_user: the Redis user that wrote the entry, as Redis reports it; empty if it does not.
    """

    version: int = WIRE_VERSION
    at: float
    actor: str
    via: str
    address: str = ""
    action: str
    target: str = ""
    details: dict[str, str] = {}
    result: str = "ok"
    entry_id: str = ""
    source: str = ""
    redis_user: str = ""


_actor: ContextVar[Actor | None] = ContextVar("penstock_actor", default=None)


def change_words(before: str, after: str) -> str:
    """Return a detail of an entry: a value before and after a change, or that it is unchanged."""
    return f"{after}, unchanged" if before == after else f"{before}{ARROW}{after}"


def current_actor() -> Actor:
    """Return the actor of this task; by default the process's user, as a client."""
    return _actor.get() or process_actor("client")


def process_actor(via: str) -> Actor:
    """Return the operating system's user of this process as an actor."""
    address = f"{socket.gethostname()}:{os.getpid()}"
    return Actor(name=_process_user(), via=via, address=address, source=ActorSource.PROCESS)


def _process_user() -> str:
    if not hasattr(os, "getuid"):
        return os.getlogin()  # Windows asks the system
    uid = os.getuid()
    try:
        return importlib.import_module("pwd").getpwuid(uid).pw_name
    except KeyError:  # a container with an arbitrary user id
        return f"uid {uid}"


@contextlib.contextmanager
def acting_as(actor: Actor) -> Generator[None]:
    """Set the actor of the calls inside."""
    token = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(token)


class Audit:
    """The entries of one namespace, at its home Redis; the last ``MAX_ENTRIES`` of operators and of apps are retained.

    Apps write to a separate stream, because a Redis user that may append to a stream may empty it as well.
    """

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._key = keys.audit()
        self._apps_key = keys.audit_of_apps()

    @contextlib.asynccontextmanager
    async def audited(self, action: str, target: str = "", **details: object) -> AsyncGenerator[dict[str, object]]:
        """Write an entry about the change inside, also if it fails. Details may be added to the yielded dict."""
        entry_details = dict(details)
        try:
            yield entry_details
        except Exception as error:
            code = error.code if isinstance(error, PenstockError) else type(error).__name__
            await self._try_write(action, target, entry_details, code)
            raise
        await self._try_write(action, target, entry_details, "ok")

    async def read(self, *, limit: int = 100, before: str = "") -> list[AuditEntry]:
        """Return ``limit`` entries older than the id ``before``, rarely one more, the newest first."""
        start, limit = f"({before}" if before else "+", min(limit, MAX_READ)
        rows = [
            (_place(entry_id), entry_id.decode(), fields[1])
            for key in (self._key, self._apps_key)
            for entry_id, fields in await self._connection.execute("XREVRANGE", key, start, "-", "COUNT", limit)
        ]
        rows.sort(key=lambda row: row[0], reverse=True)
        if len(rows) > limit and rows[limit][0] == rows[limit - 1][0]:
            limit += 1  # an operator's and an app's at the same time, of which the next page would skip one
        return [_entry(entry_id, record) for _, entry_id, record in rows[:limit]]

    async def _try_write(self, action: str, target: str, details: dict[str, Any], result: str) -> None:
        """Write an entry if possible in time; otherwise log it, because the change is done anyway."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._write_entry(action, target, details, result)
        except (TimeoutError, PenstockError, RedisError) as error:
            log.error("audit_not_written", action=action, target=_plain(target), result=result, error=str(error))

    async def _write_entry(self, action: str, target: str, details: dict[str, Any], result: str) -> None:
        actor = current_actor()
        entry = AuditEntry(
            at=time.time(),
            actor=actor.name,
            via=actor.via,
            address=actor.address,
            action=action,
            target=_plain(target),
            details={name: _plain(value) for name, value in details.items() if value not in (None, "")},
            result=result,
            source=actor.source,
            redis_user=await self._redis_user(),
        )
        record = msgspec.json.encode(entry)
        rest = ("MAXLEN", "~", MAX_ENTRIES, "*", "entry", record)
        try:
            await self._connection.execute("XADD", self._key if actor.via in _OPERATORS else self._apps_key, *rest)
        except NoPermissionError:
            # ACL files of older versions let apps write to the operators' entries alone.
            await self._connection.execute("XADD", self._key, *rest)

    async def _redis_user(self) -> str:
        """Return the Redis user of this process. Some servers have no ACL, and older users may not ask."""
        try:
            name = await self._connection.link_to(self._key).execute("ACL", "WHOAMI")
        except ResponseError:
            return ""
        return name.decode(errors="replace") if isinstance(name, bytes) else ""


def _plain(value: object) -> str:
    """Return a value as text that can be encoded, within the length limit."""
    return str(value)[:MAX_DETAIL_CHARS].encode(errors="replace").decode()


def _place(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number)


def _entry(entry_id: str, record: bytes) -> AuditEntry:
    entry = decode_record("audit entry", entry_id, record, AuditEntry)
    if entry is None:
        at = int(entry_id.partition("-")[0]) / 1000
        entry = AuditEntry(at=at, actor="-", via="-", action=UNREADABLE)
    return msgspec.structs.replace(entry, entry_id=entry_id)
