"""All that Redis holds of one model, read at once."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from penstock.shared.connection import CommandConnection
from penstock.shared.keys import ModelKeys

_READ = """
local found = {}
for i, key in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do
  local kind, value = redis.call('TYPE', key).ok, nil
  if kind == 'string' then value = redis.call('GET', key)
  elseif kind == 'list' then value = redis.call('LRANGE', key, 0, -1)
  elseif kind == 'set' then value = redis.call('SMEMBERS', key)
  elseif kind == 'zset' then value = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'hash' then value = redis.call('HGETALL', key)
  else value = redis.call('XRANGE', key, '-', '+') end
  found[i] = {key, kind, redis.call('PTTL', key), value}
end
return found
"""


class Snapshot:
    """Keys of one model by kind and name: ``of("lane")["standard:t0"]``, ``one("queue")``.

    Sets are of str, sorted sets str -> float, hashes str -> str, streams pairs of entry id and request id; strings are
    bytes and lists of bytes. A key that is absent reads as empty.
    """

    def __init__(self, prefix: str, rows: list[Any]) -> None:
        self._found: dict[str, dict[str, Any]] = defaultdict(dict)
        self._ttls: dict[tuple[str, str], int] = {}
        for key, kind, ttl_ms, value in rows:
            name, _, rest = key.decode().removeprefix(prefix).partition(":")
            self._found[name][rest] = _read(kind, value)
            self._ttls[name, rest] = ttl_ms

    def of(self, kind: str) -> dict[str, Any]:
        return self._found.get(kind, {})

    def one(self, kind: str) -> Any:
        """The key that has no name beside its kind; {} if it is absent."""
        return self._found.get(kind, {}).get("", {})

    def ttl_ms(self, kind: str, name: str) -> int:
        """Return the key's time to live as PTTL does: -1 if it has no end."""
        return self._ttls[kind, name]

    @property
    def kinds(self) -> set[str]:
        return set(self._found)


async def read_snapshot(commands: CommandConnection, keys: ModelKeys) -> Snapshot:
    return Snapshot(keys.prefix, await commands.execute("EVAL", _READ, 0, keys.prefix))


_SAVE = """
local found = {}
for i, key in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do
  found[i] = {key, math.max(0, redis.call('PTTL', key)), redis.call('DUMP', key)}
end
return found
"""
_RESTORE = """
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do redis.call('DEL', key) end
for i = 2, #ARGV, 3 do redis.call('RESTORE', ARGV[i], ARGV[i + 1], ARGV[i + 2]) end
"""


async def save(commands: CommandConnection, keys: ModelKeys) -> list[bytes]:
    """All keys of a model, as a replica or a file has them that hears of nothing more."""
    rows = await commands.execute("EVAL", _SAVE, 0, keys.prefix)
    return [part for row in rows for part in row]


async def restore(commands: CommandConnection, keys: ModelKeys, saved: list[bytes]) -> None:
    """Make a model's keys what they were when they were saved."""
    await commands.execute("EVAL", _RESTORE, 0, keys.prefix, *saved)


async def forget(commands: CommandConnection, keys: ModelKeys) -> None:
    """Delete all keys of a model, so that the next snapshot of another has less to walk over."""
    found = await commands.execute("KEYS", keys.prefix + "*")
    if found:
        await commands.execute("DEL", *found)


def _read(kind: bytes, value: Any) -> Any:
    if kind == b"set":
        return {member.decode() for member in value}
    if kind == b"zset":
        return {member.decode(): float(score) for member, score in _pairs(value)}
    if kind == b"hash":
        return {field.decode(): content.decode("latin-1") for field, content in _pairs(value)}
    if kind == b"stream":
        return [(entry.decode(), fields[1].partition(b"\n")[0].decode()) for entry, fields in value]  # ids of requests
    return value


def _pairs(flat: list[bytes]) -> zip[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
