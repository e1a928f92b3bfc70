"""Checks of logs for readers that receive no messages, many readers in one command.

``LogChecks`` looks once, soon after a request was enqueued. Subscription and request are sent at the same time, so the
first record may be published before there is a subscriber. A reader that has received a record knows, because that is
the first record or proves a gap. For the others one command counts their logs. Mostly there is none, and nothing was
missed.

``SilenceWatch`` looks every few seconds. Nothing is published about a request whose data is lost (FLUSHALL, a restart
without a file, a failover to a replica that had not received it), so its readers would wait forever. The same holds for
an end that was published without a subscriber: a model that moved to another shard and back before its clients noticed
leaves no trace. A script compares the number of records of each silent reader with its log. A reader that is behind
reads its log, or finds that there is none. Readers also end with an error if their Redis stays a read-only replica.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import RedisError

from ...shared.broker.request_history import find_unread
from ...shared.connection import CommandConnection
from ...shared.errors import PenstockError, RedisUnavailableError
from ...shared.keys import Keys
from ...shared.process.log import get_logger
from ...shared.process.side_by_side import SideBySide
from .reader import DeltaReader

CHECK_EVERY_S = 3.0
# By then a name in DNS leads to the new primary after a failover. With Sentinel the first query does.
READ_ONLY_PATIENCE_S = 20.0
# Limit of keys per script; each costs the server about a microsecond.
MAX_KEYS = 500

log = get_logger(__name__)


class SilenceWatch:
    """Watches over the readers of one client. Costs nothing while there are none."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._readers: set[DeltaReader] = set()
        self._silent: dict[str, list[DeltaReader]] = {}
        self._looking: asyncio.Task[None] | None = None

    @contextmanager
    def watching(self, reader: DeltaReader) -> Iterator[None]:
        """Make ``reader`` raise an error if its request is lost while the block runs."""
        self._readers.add(reader)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_forever())
        try:
            yield
        finally:
            self._readers.discard(reader)
            if not self._readers:
                self._stop_looking()

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._looking = None

    async def _look_forever(self) -> None:
        looks, probes = SideBySide(self._look), SideBySide(self._probe)
        try:
            while True:
                await asyncio.sleep(CHECK_EVERY_S)
                self._silent = self._pop_silent_readers()
                self._end_at_replicas()
                await probes.round(self._silent, 0.0)
                for error in await looks.round(self._silent, CHECK_EVERY_S):
                    # Redis may be away. The next check retries after any error.
                    log.debug("requests_not_looked_for", error=str(error))
        finally:
            await asyncio.gather(looks.close(), probes.close())

    def _pop_silent_readers(self) -> dict[str, list[DeltaReader]]:
        """Return the readers that received nothing since the last check, by partition."""
        silent: dict[str, list[DeltaReader]] = {}
        for reader in self._readers:
            if reader.was_silent_since_last_call():
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
        positions = [(reader.request_id, reader.num_records) for reader in readers]
        for place in await find_unread(self._connection, self._keys.model(model), positions):
            readers[place].catch_up()

    async def _probe(self, model: str) -> None:
        """Send a write without effect, which a replica refuses: ``read_only_for_s`` counts from its first refusal."""
        with contextlib.suppress(PenstockError):
            await self._connection.execute("UNLINK", self._keys.model(model).absent)


def _read_only(link: CommandConnection) -> RedisUnavailableError:
    return RedisUnavailableError(
        f"Redis at {link.shown_url} has been a read-only replica for {READ_ONLY_PATIENCE_S:g} s, so the request cannot "
        "go on here; give the URL of the primary, or redis+sentinel://, which follows it"
    )


# Longer than enqueueing takes, so that only requests that wait in the queue cost a check.
CHECK_AFTER_S = 0.05


class LogChecks:
    """Early checks for the readers of one client. A reader reads its log if one exists, or if Redis did not answer."""

    def __init__(self, connection: CommandConnection) -> None:
        self._connection = connection
        self._readers: list[DeltaReader] = []
        self._timer: asyncio.TimerHandle | None = None
        self._looking: set[asyncio.Task[None]] = set()

    def add(self, reader: DeltaReader) -> None:
        """Check soon for ``reader``, which is subscribed and whose request is enqueued."""
        self._readers.append(reader)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_AFTER_S, self._look)

    async def close(self) -> None:
        """Stop checking."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._looking:
            task.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)

    def _look(self) -> None:
        readers, self._readers, self._timer = self._readers, [], None
        silent: dict[str, list[DeltaReader]] = {}
        for reader in readers:
            if reader.may_have_missed_first:
                silent.setdefault(reader.partition, []).append(reader)
        for readers_of_partition in silent.values():
            for start in range(0, len(readers_of_partition), MAX_KEYS):
                task = asyncio.create_task(self._ask_for_unread(readers_of_partition[start : start + MAX_KEYS]))
                self._looking.add(task)
                task.add_done_callback(self._looking.discard)

    async def _ask_for_unread(self, readers: list[DeltaReader]) -> None:
        try:
            # EXISTS counts a key twice that is passed twice, which does not matter here.
            if not await self._connection.execute("EXISTS", *(reader.log_key for reader in readers)):
                return
        except (PenstockError, RedisError) as error:
            log.debug("logs_not_looked_for", error=str(error))  # each reader gets the error from its own read
        for reader in readers:
            if reader.may_have_missed_first:
                reader.catch_up()
