"""Whether something was published of a request before its reader listened, asked of Redis for many readers at once.

Subscription and request are under way together, so a first record may come before there is a subscriber. A reader that
has heard something knows, since that is the first record or proves a gap. For those that hear nothing in a moment, one
command counts their logs. Mostly there is none, and then none of them has missed anything.
"""

from __future__ import annotations

import asyncio

from redis.exceptions import RedisError

from ...shared.connection import CommandConnection
from ...shared.errors import PenstockError
from ...shared.process.log import get_logger
from .reader import DeltaReader
from .silence_watch import MAX_KEYS

# Longer than it takes to enqueue, so that only requests that wait pay for it.
FIRST_LOOK_AFTER_S = 0.05

log = get_logger(__name__)


class FirstLooks:
    """Looks for readers of one client. A reader looks at its own log where there is one, or Redis did not answer."""

    def __init__(self, connection: CommandConnection) -> None:
        self._connection = connection
        self._readers: list[DeltaReader] = []
        self._timer: asyncio.TimerHandle | None = None
        self._looking: set[asyncio.Task[None]] = set()

    def add(self, reader: DeltaReader) -> None:
        """Look for ``reader`` soon; it is subscribed, and its request is enqueued."""
        self._readers.append(reader)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FIRST_LOOK_AFTER_S, self._look)

    async def close(self) -> None:
        """Look no more."""
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
        for of_partition in silent.values():
            for start in range(0, len(of_partition), MAX_KEYS):
                task = asyncio.create_task(self._ask(of_partition[start : start + MAX_KEYS]))
                self._looking.add(task)
                task.add_done_callback(self._looking.discard)

    async def _ask(self, readers: list[DeltaReader]) -> None:
        try:
            # A key that is asked for twice counts twice.
            if not await self._connection.execute("EXISTS", *(reader.log_key for reader in readers)):
                return
        except (PenstockError, RedisError) as error:
            log.debug("logs_not_looked_for", error=str(error))  # each reader is told by its own look
        for reader in readers:
            if reader.may_have_missed_first:
                reader.catch_up()
