"""Schedule of the work besides requests (deliver an event, run a batch): when each item is due, and who works on it.

An item is ``KIND:ID``. Its score in one sorted set is its due time or, while a process works on it, the end of that
process's lease. So an item with a past score has no worker: when a process dies, its items are due again as soon as its
leases end. The token of a hold is a fence: a process that was stopped for longer than its lease reads another token,
and cannot reschedule the item any more.

Times are those of the Redis clock. A second sorted set stores when each item was scheduled. If that time is in the
future, the clock has been set back since, and the item is due earlier by the difference.

A process that adds an item first writes the data that the item refers to. An item that runs twice or too late therefore
sees that nothing is left to do.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec

from ...shared.connection import CommandConnection
from ...shared.keys import Keys
from ...shared.redis_access.script import Script, linked_text, script_of

LEASE_TTL_S = 10.0
# A lease is renewed after this share of its time.
RENEW_SHARE = 1 / 3


class DueItem(msgspec.Struct, frozen=True):
    """A due item. ``token`` is that of a hold whose lease has ended; empty if no process held it."""

    kind: str
    item_id: str
    token: str = ""


def _script(name: str, text: str) -> Script:
    return script_of(name, linked_text("-- uses: clock\n" + _DUE_TIMES + text, {}))


# KEYS of each: due, holders, set_at.
_DUE_TIMES = """
local due_at, set_at, now = KEYS[1], KEYS[3], now_ms()
local early = redis.call('ZRANGEBYSCORE', set_at, '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, marks.MAX_CUT)
for i = 1, #early, 2 do
  local due = redis.call('ZSCORE', due_at, early[i])
  if due then redis.call('ZADD', due_at, tonumber(due) - (tonumber(early[i + 1]) - now), early[i]) end
  redis.call('ZADD', set_at, now, early[i])
end
local function set_due(item, delay_ms)
  redis.call('ZADD', due_at, now + tonumber(delay_ms), item)
  redis.call('ZADD', set_at, now, item)
end
local function remove_item(item)
  redis.call('ZREM', due_at, item)
  redis.call('ZREM', set_at, item)
end
"""
# ARGV: item, delay_ms, LT or NX. LT keeps an earlier due time, NX any present due time. An item that is held stays
# unchanged. Returns 1 unless the item is held.
_ADD = _script(
    "agenda_add",
    """
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then return 0 end
local due = redis.call('ZSCORE', due_at, ARGV[1])
if not due or ARGV[3] == 'LT' and now + tonumber(ARGV[2]) < tonumber(due) then set_due(ARGV[1], ARGV[2]) end
return 1
""",
)
# ARGV: item, token, lease_ms. Returns 1 if the item was due and is now held. Repeating it with the same token is safe.
_HOLD = _script(
    "agenda_hold",
    """
local due = redis.call('ZSCORE', due_at, ARGV[1])
if not due then return 0 end
if tonumber(due) > now and redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
set_due(ARGV[1], ARGV[3])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1
""",
)
# ARGV: item, token, lease_ms. Returns 0 if the hold was lost.
_RENEW = _script(
    "agenda_renew",
    """
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
if redis.call('ZSCORE', due_at, ARGV[1]) then set_due(ARGV[1], ARGV[3]) end
return 1
""",
)
# ARGV: item, token, delay_ms (empty if the item is done). Returns 0 if the hold was lost.
_LET_GO = _script(
    "agenda_let_go",
    """
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[2], ARGV[1])
if ARGV[3] == '' then remove_item(ARGV[1]) else set_due(ARGV[1], ARGV[3]) end
return 1
""",
)
# ARGV: limit. Returns item and token (may be empty) of each due item, the longest due first. If more than limit are
# due, the second half are the items that became due last, so that a backlog does not block all later items.
_DUE = _script(
    "agenda_due",
    """
local limit = tonumber(ARGV[1])
local num_due = redis.call('ZCOUNT', due_at, '-inf', now)
local num_first, num_last = math.min(num_due, limit), 0
if num_due > limit then
  num_last = math.floor(limit / 2)
  num_first = limit - num_last
end
-- Due items come first in the sorted set.
local items = num_first > 0 and redis.call('ZRANGE', due_at, 0, num_first - 1) or {}
if num_last > 0 then
  for _, item in ipairs(redis.call('ZRANGE', due_at, num_due - num_last, num_due - 1)) do
    items[#items + 1] = item
  end
end
local due = {}
for _, item in ipairs(items) do
  due[#due + 1] = item
  due[#due + 1] = redis.call('HGET', KEYS[2], item) or ''
end
return due
""",
)


class Agenda:
    """The agenda of one namespace.

    All methods raise ``RedisUnavailableError`` if Redis is unreachable for longer than the connection retries.
    """

    def __init__(self, connection: CommandConnection, keys: Keys, *, lease_ttl_s: float = LEASE_TTL_S) -> None:
        self._connection = connection
        self._keys = [keys.jobs_due(), keys.job_holders(), keys.jobs_set_at()]
        self._lease_ttl_s = lease_ttl_s

    async def add(self, kind: str, item_id: str, delay_s: float = 0.0, *, unless_known: bool = False) -> bool:
        """Schedule an item in ``delay_s``, or at its present due time if that is earlier. False if a process works on
        it now.

        Args:
            unless_known: leave the due time of an item that is on the agenda unchanged.
        """
        return bool(
            await self._run_script(_ADD, f"{kind}:{item_id}", round(delay_s * 1000), "NX" if unless_known else "LT")
        )

    async def remove(self, kind: str, item_id: str) -> None:
        """Delete an item. A process that works on it loses its hold."""
        for command, key in zip(("ZREM", "HDEL", "ZREM"), self._keys, strict=True):
            await self._connection.execute(command, key, f"{kind}:{item_id}")

    async def due(self, limit: int) -> list[DueItem]:
        """Return up to ``limit`` due items without a live hold: the longest due first, or half of each end if there are
        more.
        """
        flat = await self._run_script(_DUE, limit)
        items: list[DueItem] = []
        for item, token in zip(flat[::2], flat[1::2], strict=True):
            kind, _, item_id = item.decode().partition(":")
            items.append(DueItem(kind, item_id, token.decode()))
        return items

    async def hold(self, kind: str, item_id: str) -> Hold | None:
        """Acquire a due item; None if it is not due, or another process holds it."""
        hold = Hold(self, f"{kind}:{item_id}", os.urandom(12).hex())
        return hold if await self._run_script(_HOLD, hold.item, hold.token, self._lease_ms) else None

    async def let_go(self, item: str, token: str, delay_s: float | None) -> bool:
        """Release a hold: the item is done (None), or due again in ``delay_s``. False if the hold was lost."""
        delay_ms = "" if delay_s is None else round(delay_s * 1000)
        return bool(await self._run_script(_LET_GO, item, token, delay_ms))

    async def keep(self, hold: Hold) -> None:
        """Renew a hold until it is lost; then return."""
        while await self._run_script(_RENEW, hold.item, hold.token, self._lease_ms):  # noqa: ASYNC110  # time passes; no event is awaited
            await asyncio.sleep(self._lease_ttl_s * RENEW_SHARE)

    @property
    def _lease_ms(self) -> int:
        return round(self._lease_ttl_s * 1000)

    async def _run_script(self, script: Script, *args: Any) -> Any:
        return await self._connection.run_script(script, self._keys, list(args))


class Hold(msgspec.Struct, frozen=True):
    """An item that this process works on. Keep it while working, and release it at the end."""

    agenda: Agenda
    item: str
    token: str

    async def keep(self) -> None:
        """Renew the lease until the hold is lost; then return."""
        await self.agenda.keep(self)

    async def let_go(self, delay_s: float | None) -> bool:
        """Release the hold: the item is done (None), or due again in ``delay_s``. False if the hold was lost."""
        return await self.agenda.let_go(self.item, self.token, delay_s)
