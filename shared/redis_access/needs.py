"""The commands and keys that Penstock needs of a Redis, and how to try them without changing anything.

A command is tried inside of a transaction that is discarded: Redis checks its name and the user's rights when it
queues it, and runs nothing. ``tests/unit/shared/test_redis_needs.py`` holds the list against scripts and calls.
"""

from __future__ import annotations

from typing import Any

from ..keys import Keys

_KEY, _CHANNEL = object(), object()

# Arguments that are in order, for a command that is not run.
NEEDED: dict[str, tuple[Any, ...]] = {
    "DEL": (_KEY,),
    "EVAL": ("return 1", 0),
    "EVALSHA": ("0" * 40, 0),
    "EXISTS": (_KEY,),
    "EXPIRE": (_KEY, 1),
    "GET": (_KEY,),
    "HDEL": (_KEY, "field"),
    "HEXISTS": (_KEY, "field"),
    "HGET": (_KEY, "field"),
    "HGETALL": (_KEY,),
    "HINCRBY": (_KEY, "field", 1),
    "HINCRBYFLOAT": (_KEY, "field", 1),
    "HKEYS": (_KEY,),
    "HLEN": (_KEY,),
    "HMGET": (_KEY, "field"),
    "HSET": (_KEY, "field", ""),
    "HSETNX": (_KEY, "field", ""),
    "HVALS": (_KEY,),
    "LINDEX": (_KEY, 0),
    "LLEN": (_KEY,),
    "LPOP": (_KEY,),
    "LPOS": (_KEY, ""),
    "LRANGE": (_KEY, 0, 0),
    "LREM": (_KEY, 0, ""),
    "MGET": (_KEY,),
    "PEXPIRE": (_KEY, 1),
    "PEXPIREAT": (_KEY, 1),
    "PTTL": (_KEY,),
    "PUBLISH": (_CHANNEL, ""),
    "PUBSUB": ("NUMSUB", _CHANNEL),
    "RPUSH": (_KEY, ""),
    "SADD": (_KEY, ""),
    "SCARD": (_KEY,),
    "SET": (_KEY, ""),
    "SISMEMBER": (_KEY, ""),
    "SMEMBERS": (_KEY,),
    "SREM": (_KEY, ""),
    "TIME": (),
    "TYPE": (_KEY,),
    "UNLINK": (_KEY,),
    "XADD": (_KEY, "*", "field", ""),
    "XDEL": (_KEY, "0-1"),
    "XLEN": (_KEY,),
    "XRANGE": (_KEY, "-", "+"),
    "XREVRANGE": (_KEY, "+", "-"),
    "XTRIM": (_KEY, "MAXLEN", 0),
    "ZADD": (_KEY, 0, ""),
    "ZCARD": (_KEY,),
    "ZCOUNT": (_KEY, 0, 0),
    "ZINCRBY": (_KEY, 0, ""),
    "ZPOPMIN": (_KEY,),
    "ZRANGE": (_KEY, 0, 0),
    "ZRANGEBYSCORE": (_KEY, 0, 0),
    "ZRANK": (_KEY, ""),
    "ZREM": (_KEY, ""),
    "ZREMRANGEBYSCORE": (_KEY, 0, 0),
    "ZSCAN": (_KEY, 0),
    "ZSCORE": (_KEY, ""),
}

# Of arq, which keeps what a job is under keys of its own.
NEEDED_FOR_JOBS: dict[str, tuple[Any, ...]] = {
    "DBSIZE": (),
    "INCR": (_KEY,),
    "INCRBY": (_KEY, 1),  # as redis-py sends it
    "INFO": (),
    "PSETEX": (_KEY, 1, ""),
}
ARQ_KEYS = "arq:"
# Of an operator who moves a model to another shard; it is told by the command itself.
NEEDED_FOR_MOVES = ("DUMP", "RESTORE", "SCAN", "XINFO", "XSETID")
# Of an operator who reads what others have done: `penstock audit`, and the page.
NEEDED_FOR_OPERATORS = ("XREVRANGE",)


def cluster_probes(namespace: str) -> list[tuple[Any, ...]]:
    """Return the same calls on keys and channels of one model, which the node tries that serves it."""
    keys = Keys(namespace).model("probe")
    calls = [_call(name, args, keys.absent, keys.wake) for name, args in NEEDED.items()]
    return [*calls, ("EXISTS", keys.leases)]


def probes(namespace: str, *, for_jobs: bool = False) -> list[tuple[Any, ...]]:
    """Return one call of each needed command, on keys and channels that nothing is ever written to."""
    keys = Keys(namespace)
    key, channel = keys.absent(), keys.model("probe").wake
    needed = NEEDED | NEEDED_FOR_JOBS if for_jobs else NEEDED
    calls = [_call(name, args, key, channel) for name, args in needed.items()]
    # Keys of a model have a hash tag.
    calls.append(("EXISTS", keys.model("probe").leases))
    if for_jobs:
        calls += [
            _call(name, NEEDED_FOR_JOBS[name], f"{ARQ_KEYS}absent", channel) for name in ("INCR", "INCRBY", "PSETEX")
        ]
    return calls


def _call(name: str, args: tuple[Any, ...], key: str, channel: str) -> tuple[Any, ...]:
    return (name, *(key if arg is _KEY else channel if arg is _CHANNEL else arg for arg in args))
