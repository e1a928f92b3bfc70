"""What is to be done beside requests (deliver an event, run a batch), when, and who is at it.

An item is ``KIND:ID``. Its score in one sorted set is when it is due; while somebody is at it, when that one's lease
ends. So what is due is what nobody is at: a process that dies leaves its items due as soon as its leases end. The token
of a hold fences: who was stopped for longer than the lease finds another token, and may not move the item any more.

Times are by the clock of Redis. A second sorted set says when each was set. If that is in the future, the clock has
gone back since, and the item is due as much earlier.

Whoever adds an item has written first what it is about, so that an item that is run twice, or comes too late, finds
that there is nothing left to do.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec

from ..shared.connection import CommandConnection
from ..shared.keys import Keys
from ..shared.redis_access.script import Script, linked_text, script_of

LEASE_TTL_S = 10.0
# Of the lease, after which it is renewed.
RENEW_SHARE = 1 / 3


class DueItem(msgspec.Struct, frozen=True):
    """An item that is due. ``token`` is of a hold whose lease has ended; empty if nobody was at it."""

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
local function strike_off(item)
  redis.call('ZREM', due_at, item)
  redis.call('ZREM', set_at, item)
end
"""
# ARGV: item, delay_ms, LT or NX. Due then, or earlier if it was (LT), or when it was (NX); one that somebody is at is
# left alone. Returns whether nobody was.
_ADD = _script(
    "agenda_add",
    """
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then return 0 end
local due = redis.call('ZSCORE', due_at, ARGV[1])
if not due or ARGV[3] == 'LT' and now + tonumber(ARGV[2]) < tonumber(due) then set_due(ARGV[1], ARGV[2]) end
return 1
""",
)
# ARGV: item, token, lease_ms. Returns 1 if it was due and is held now; holding it again with the same token is no harm.
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
# ARGV: item, token, lease_ms. Returns 0 if the hold is another's.
_RENEW = _script(
    "agenda_renew",
    """
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
if redis.call('ZSCORE', due_at, ARGV[1]) then set_due(ARGV[1], ARGV[3]) end
return 1
""",
)
# ARGV: item, token, delay_ms: empty if it is done. Returns 0 if the hold is another's.
_LET_GO = _script(
    "agenda_let_go",
    """
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[2], ARGV[1])
if ARGV[3] == '' then strike_off(ARGV[1]) else set_due(ARGV[1], ARGV[3]) end
return 1
""",
)
# ARGV: most. Returns item and token, which may be empty, of each that is due: the longest due first. If more are due,
# the second half is of those that became due last: a backlog must not stand before everything that comes later.
_DUE = _script(
    "agenda_due",
    """
local most = tonumber(ARGV[1])
local num_due = redis.call('ZCOUNT', due_at, '-inf', now)
local num_first, num_last = math.min(num_due, most), 0
if num_due > most then
  num_last = math.floor(most / 2)
  num_first = most - num_last
end
-- The items that are due are the first of the set.
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

    All methods raise ``RedisUnavailableError`` when Redis stays away for longer than the connection retries.
    """

    def __init__(self, connection: CommandConnection, keys: Keys, *, lease_ttl_s: float = LEASE_TTL_S) -> None:
        self._connection = connection
        self._keys = [keys.jobs_due(), keys.job_holders(), keys.jobs_set_at()]
        self._lease_ttl_s = lease_ttl_s

    async def add(self, kind: str, item_id: str, delay_s: float = 0.0, *, unless_known: bool = False) -> bool:
        """Have an item due in ``delay_s``, or when it was, if that is earlier; False if somebody is at it now.

        Args:
            unless_known: an item that is on the agenda stays due when it was.
        """
        return bool(await self._run(_ADD, f"{kind}:{item_id}", round(delay_s * 1000), "NX" if unless_known else "LT"))

    async def remove(self, kind: str, item_id: str) -> None:
        """Strike an item off, whoever is at it: that one loses its hold."""
        for command, key in zip(("ZREM", "HDEL", "ZREM"), self._keys, strict=True):
            await self._connection.execute(command, key, f"{kind}:{item_id}")

    async def due(self, most: int) -> list[DueItem]:
        """Return items that are due and nobody is at: the longest due first, or half of each end if there are more."""
        flat = await self._run(_DUE, most)
        found: list[DueItem] = []
        for item, token in zip(flat[::2], flat[1::2], strict=True):
            kind, _, item_id = item.decode().partition(":")
            found.append(DueItem(kind, item_id, token.decode()))
        return found

    async def hold(self, kind: str, item_id: str) -> Hold | None:
        """Take an item that is due; None if it is not, or somebody is at it."""
        hold = Hold(self, f"{kind}:{item_id}", os.urandom(12).hex())
        return hold if await self._run(_HOLD, hold.item, hold.token, self._lease_ms) else None

    async def let_go(self, item: str, token: str, delay_s: float | None) -> bool:
        """End a hold: the item is done, or due again in ``delay_s``. False if the hold is another's by now."""
        delay_ms = "" if delay_s is None else round(delay_s * 1000)
        return bool(await self._run(_LET_GO, item, token, delay_ms))

    async def keep(self, hold: Hold) -> None:
        """Renew a hold until it is lost; then return."""
        while await self._run(_RENEW, hold.item, hold.token, self._lease_ms):  # noqa: ASYNC110  # it is the clock's turn
            await asyncio.sleep(self._lease_ttl_s * RENEW_SHARE)

    @property
    def _lease_ms(self) -> int:
        return round(self._lease_ttl_s * 1000)

    async def _run(self, script: Script, *args: Any) -> Any:
        return await self._connection.run_script(script, self._keys, list(args))


class Hold(msgspec.Struct, frozen=True):
    """An item that this process is at; it has to be kept, and let go at the end."""

    agenda: Agenda
    item: str
    token: str

    async def keep(self) -> None:
        """Renew the lease until the hold is lost; then return."""
        await self.agenda.keep(self)

    async def let_go(self, delay_s: float | None) -> bool:
        """End it: the item is done (None), or due again in ``delay_s``. False if it was lost."""
        return await self.agenda.let_go(self.item, self.token, delay_s)
