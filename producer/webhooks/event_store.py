"""Store the events of one namespace: create each once, and change them by compare-and-set."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from ...shared.connection import CommandConnection
from ...shared.deployment.records import decode_records
from ...shared.errors import RequestNotFoundError
from ...shared.keys import Keys
from ...shared.redis_access.script import script_of
from ...shared.values.shown import shown
from ..background.agenda import Agenda
from .events import EventState, WebhookEvent

# Kind of the agenda's item, and name of the job.
DELIVER = "deliver_webhook"
PAGE = 200

_decoder = msgspec.json.Decoder(WebhookEvent)
_STATES = list(EventState)


# KEYS: event, pending. ARGV: record, id, created_ms. Returns 0 if the id exists.
_CREATE = script_of(
    "webhook_create",
    """
if not redis.call('SET', KEYS[1], ARGV[1], 'NX') then return 0 end
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[2])
return 1
""",
)
# KEYS: event, then one key per state. ARGV: old record, new record (empty to delete it), id, created_ms, index of the
# key of the new state, ttl_ms (0 for none), time in ms before which delivered events have expired. Returns 0 if the
# record has changed.
_CHANGE = script_of(
    "webhook_change",
    """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
for i = 2, #KEYS do redis.call('ZREM', KEYS[i], ARGV[3]) end
if ARGV[2] == '' then
  redis.call('DEL', KEYS[1])
  return 1
end
redis.call('SET', KEYS[1], ARGV[2])
if ARGV[6] ~= '0' then redis.call('PEXPIRE', KEYS[1], ARGV[6]) end
redis.call('ZADD', KEYS[tonumber(ARGV[5])], ARGV[4], ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', ARGV[7])
return 1
""",
)


class StoredEvent(msgspec.Struct, frozen=True):
    """An event with the bytes it was read from, by which a change detects concurrent changes."""

    event: WebhookEvent
    data: bytes


class EventStore:
    """Creates, changes and reads events.

    All methods raise ``RedisUnavailableError`` when Redis is away for longer than the connection retries.
    """

    def __init__(self, connection: CommandConnection, keys: Keys, agenda: Agenda) -> None:
        self._connection = connection
        self._keys = keys
        self._agenda = agenda

    async def create(self, event: WebhookEvent) -> None:
        """Create an event, unless its id exists, and schedule its delivery."""
        keys = [self._keys.webhook_event(event.event_id), self._keys.webhook_events(EventState.PENDING)]
        args = [msgspec.json.encode(event), event.event_id, round(event.created_at * 1000)]
        await self._connection.run_script(_CREATE, keys, args)
        # If it is delivered already, the job detects that.
        await self._agenda.add(DELIVER, event.event_id)

    async def read(self, event_id: str) -> StoredEvent | None:
        data = await self._connection.execute("GET", self._keys.webhook_event(event_id))
        return None if data is None else StoredEvent(_decoder.decode(data), data)

    async def show(self, event_id: str) -> WebhookEvent:
        """Return one event.

        Raises:
            RequestNotFoundError: no event has this id, or it was delivered and has expired.
        """
        return (await self._read_existing(event_id)).event

    async def list(self, state: EventState) -> list[WebhookEvent]:
        """Return the events in one state, oldest first."""
        ids = await self._connection.execute("ZRANGE", self._keys.webhook_events(state), 0, -1)
        events: list[WebhookEvent] = []
        for start in range(0, len(ids), PAGE):
            events += await self._read_all(ids[start : start + PAGE])
        return events

    async def newest(self, state: EventState, limit: int) -> Sequence[WebhookEvent]:
        """Return the last events in one state, newest first."""
        ids = await self._connection.execute("ZRANGE", self._keys.webhook_events(state), -limit, -1)
        return await self._read_all(ids[::-1]) if ids else []

    async def _read_all(self, ids: Sequence[bytes]) -> Sequence[WebhookEvent]:
        """Return the events with these ids, except those that are missing or unreadable."""
        names = [event_id.decode() for event_id in ids]
        records = await self._connection.execute("MGET", *map(self._keys.webhook_event, names))
        pairs = [(name, data) for name, data in zip(names, records, strict=True) if data]
        return [*decode_records("webhook event", pairs, WebhookEvent)]

    async def count(self, state: EventState) -> int:
        """Return the number of events in one state."""
        return int(await self._connection.execute("ZCARD", self._keys.webhook_events(state)))

    async def change(self, stored: StoredEvent, event: WebhookEvent, *, keep_delivered_s: float) -> bool:
        """Replace an event. Returns False and writes nothing if it was changed since it was read."""
        ttl_ms = round(keep_delivered_s * 1000) if event.state is EventState.DELIVERED else 0
        return await self._change_state(stored, msgspec.json.encode(event), event.state, ttl_ms)

    async def replay(self, event_id: str) -> None:
        """Deliver an event again immediately, starting with its first attempt, in any state. Its id stays the same.

        Raises:
            RequestNotFoundError: no event has this id.
        """
        while True:
            stored = await self._read_existing(event_id)
            fresh = msgspec.structs.replace(stored.event, state=EventState.PENDING, num_attempts=0, next_attempt_at=0.0)
            if await self._change_state(stored, msgspec.json.encode(fresh), fresh.state, 0):
                break
        await self._agenda.add(DELIVER, event_id)

    async def purge(self, event_id: str) -> bool:
        """Delete an event, delivered or not. Returns False if no event has this id."""
        while (stored := await self.read(event_id)) is not None:
            if await self._change_state(stored, b"", stored.event.state, 0):
                await self._agenda.remove(DELIVER, event_id)
                return True
        return False

    async def _read_existing(self, event_id: str) -> StoredEvent:
        stored = await self.read(event_id)
        if stored is None:
            raise RequestNotFoundError(f"unknown webhook event {shown(event_id)}; 'penstock webhook list' shows all")
        return stored

    async def _change_state(self, stored: StoredEvent, data: bytes, state: EventState, ttl_ms: int) -> bool:
        event_id = stored.event.event_id
        keys = [self._keys.webhook_event(event_id), *map(self._keys.webhook_events, _STATES)]
        created_ms, oldest_ms = round(stored.event.created_at * 1000), round(time.time() * 1000) - ttl_ms
        args = [stored.data, data, event_id, created_ms, _STATES.index(state) + 2, ttl_ms, oldest_ms if ttl_ms else 0]
        return bool(await self._connection.run_script(_CHANGE, keys, args))
