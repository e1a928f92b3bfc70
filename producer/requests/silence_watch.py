"""Streams hear in the end what they did not hear when it was published, or that there is nothing more to hear.

Nothing is published of a request whose data are gone (FLUSHALL, a restart without a file, a failover to a replica that
had not got it), so its readers would wait for ever. So would one whose end was published while nobody listened: a model
that moved to another shard and back before its clients heard of it leaves no trace. Once every few seconds those that
have heard nothing since are counted against their logs, many in one script; who is behind reads its log, or finds that
there is none. Redis that is no longer one that anybody writes to ends them, too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

from ...shared.broker.unread import find_unread
from ...shared.connection import CommandConnection
from ...shared.errors import PenstockError, RedisUnavailableError
from ...shared.keys import Keys
from ...shared.process.log import get_logger
from ...shared.process.side_by_side import SideBySide
from .reader import DeltaReader

LOOK_EVERY_S = 3.0
# Of a failover by DNS the name leads to the new primary by then; of one by Sentinel the first question does.
READ_ONLY_PATIENCE_S = 20.0
# Of one script, about a microsecond of the server each.
MAX_KEYS = 500

log = get_logger(__name__)


class SilenceWatch:
    """Watches over the readers of one client; costs nothing while it has none."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._readers: set[DeltaReader] = set()
        self._silent: dict[str, list[DeltaReader]] = {}
        self._looking: asyncio.Task[None] | None = None

    @contextmanager
    def watching(self, reader: DeltaReader) -> Iterator[None]:
        """Have ``reader`` fail while the block runs, should its request be lost."""
        self._readers.add(reader)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_forever())
        try:
            yield
        finally:
            self._readers.discard(reader)
            if not self._readers:
                self._stop()

    def _stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._looking = None

    async def _look_forever(self) -> None:
        looks, probes = SideBySide(self._look), SideBySide(self._probe)
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                self._silent = self._take_silent()
                self._end_at_replicas()
                await probes.round(self._silent, 0.0)
                for error in await looks.round(self._silent, LOOK_EVERY_S):
                    # A Redis that is away is waited for; whatever else it is, the next look may be luckier.
                    log.debug("requests_not_looked_for", error=str(error))
        finally:
            await asyncio.gather(looks.close(), probes.close())

    def _take_silent(self) -> dict[str, list[DeltaReader]]:
        """The readers that have heard nothing since the last look, by partition."""
        silent: dict[str, list[DeltaReader]] = {}
        for reader in self._readers:
            if reader.take_silence():
                silent.setdefault(reader.partition, []).append(reader)
        return silent

    def _end_at_replicas(self) -> None:
        for model, readers in self._silent.items():
            link = self._connection.link_to(self._keys.model(model).absent)
            if link.read_only_for_s > READ_ONLY_PATIENCE_S:
                for reader in readers:
                    reader.fail(_read_only(link))

    async def _look(self, model: str) -> None:
        readers = self._silent.get(model, [])
        for start in range(0, len(readers), MAX_KEYS):
            await self._have_look(model, readers[start : start + MAX_KEYS])

    async def _have_look(self, model: str, readers: list[DeltaReader]) -> None:
        known = [(reader.request_id, reader.num_records) for reader in readers]
        for place in await find_unread(self._connection, self._keys.model(model), known):
            readers[place].catch_up()

    async def _probe(self, model: str) -> None:
        """Write nothing, in a way that a replica refuses: its refusals are what ``read_only_for_s`` counts from."""
        with contextlib.suppress(PenstockError):
            await self._connection.execute("UNLINK", self._keys.model(model).absent)


def _read_only(link: CommandConnection) -> RedisUnavailableError:
    return RedisUnavailableError(
        f"Redis at {link.shown_url} has been a read-only replica for {READ_ONLY_PATIENCE_S:g} s, so the request cannot "
        "go on here; give the URL of the primary, or redis+sentinel://, which follows it"
    )
