"""Create events from outbox entries, which the broker's scripts and batches write; one event per entry."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from ...shared.connection import CommandConnection
from ...shared.errors import PenstockError
from ...shared.keys import Keys
from ...shared.partitions import read_layouts
from ...shared.process.log import get_logger
from ...shared.process.side_by_side import SideBySide
from .event_store import EventStore
from .events import WebhookTarget, event_of
from .targets import encode_target

# Most entries of one outbox per sweep; sweeps follow each other after a second.
MAX_ENTRIES = 200
# After this time, a sweep no longer waits for an outbox whose Redis is away; later sweeps do.
PATIENCE_S = 5.0

log = get_logger(__name__)


class Outbox:
    """All outboxes of one namespace: one per model partition, and one for events without a model."""

    def __init__(self, connection: CommandConnection, keys: Keys, store: EventStore) -> None:
        self._connection = connection
        self._keys = keys
        self._store = store
        self._drains = SideBySide(self._drain)

    async def collect(self) -> None:
        """Create events from all entries. An entry is deleted after its event was created, so after a crash it is
        processed again."""
        outboxes = await outboxes_of(self._connection, self._keys)
        for error in await self._drains.round(outboxes, PATIENCE_S):
            raise error

    async def close(self) -> None:
        """Stop. Unfinished entries are left to the next process."""
        await self._drains.close()

    async def _drain(self, key: str) -> None:
        for entry_id, flat in await self._connection.execute("XRANGE", key, "-", "+", "COUNT", MAX_ENTRIES):
            await self._process(dict(zip(flat[::2], flat[1::2], strict=True)), key, entry_id)

    async def _process(self, fields: Mapping[bytes, bytes], key: str, entry_id: bytes) -> None:
        try:
            event = event_of(fields)
        except (msgspec.MsgspecError, PenstockError, KeyError, ValueError) as error:
            # It cannot be decoded later either.
            log.error("outbox_entry_dropped", outbox=key, entry=entry_id, reason=str(error))
        else:
            await self._store.create(event)
        await self._connection.execute("XDEL", key, entry_id)


async def outboxes_of(connection: CommandConnection, keys: Keys) -> list[str]:
    """Return the keys of all outboxes of a namespace."""
    members = await connection.execute("SMEMBERS", keys.webhook_models())
    layouts = await read_layouts(connection, keys)
    outboxes = [keys.webhook_outbox()]
    for model in (name.decode() for name in members):
        num_partitions = layouts[model].num_ever if model in layouts else 1
        outboxes += [keys.model(model, partition).outbox for partition in range(num_partitions)]
    return outboxes


def outbox_command(
    keys: Keys, target: WebhookTarget, event_type: str, data: Mapping[str, Any], ended_at: float
) -> list[Any]:
    """Return the Redis command that records an end that no broker script records, such as a batch's.

    Include it in the transaction that writes the end. Sent twice, it creates one event.
    """
    event_id = f"evt_{os.urandom(20).hex()}"
    fields = {
        "event": event_id,
        "ended_at": round(ended_at * 1000),
        "target": encode_target(target),
        "type": event_type,
        "data": msgspec.json.encode(data),
    }
    return ["XADD", keys.webhook_outbox(), "*", *(part for field in fields.items() for part in field)]
