"""The commands and keys that Penstock needs of a Redis, and users that have the rights to these and no others.

A command is tried inside of a transaction that is discarded: Redis checks its name and the user's rights when it
queues it, and runs nothing. ``tests/unit/shared/test_redis_needs.py`` holds the list against scripts and calls.

Users are written as an ACL file has them. Roles differ in keys and channels: workers and clients have no access to API
keys, operators' keys, secrets or the agenda. Within the keys of a model all roles have the same rights, because scripts
run with the rights of their caller. Redis 7 has rights to only read a key, and commands for some keys alone. Redis 6.2
has neither, so there a user may change and delete those keys as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from ..keys import Keys
from ..values.names import as_literal

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
# Logging in and naming a connection; what of it changes the server or other connections is dangerous by Redis's word.
_CONNECTION = ("+@connection", "-@dangerous")
# A connection to a database other than 0 begins with SELECT.
_ALWAYS = ("MULTI", "EXEC", "DISCARD", "SELECT", "SUBSCRIBE", "UNSUBSCRIBE", "INFO", "ACL|WHOAMI")
# By which arq takes a job before another process does.
_FOR_JOBS = ("WATCH", "UNWATCH")
# Which channels there are is nobody's business.
_PARTS = {"PUBSUB": "pubsub|numsub"}


def cluster_probes(namespace: str) -> list[tuple[Any, ...]]:
    """Return the same calls on keys and channels of one model, which the node tries that serves it."""
    keys = Keys(namespace).model("probe")
    calls = [_filled_call(name, args, keys.absent, keys.wake) for name, args in NEEDED.items()]
    return [*calls, ("EXISTS", keys.leases)]


def probes(namespace: str, *, for_jobs: bool = False) -> list[tuple[Any, ...]]:
    """Return one call of each needed command, on keys and channels that nothing is ever written to."""
    keys = Keys(namespace)
    key, channel = keys.absent(), keys.model("probe").wake
    needed = NEEDED | NEEDED_FOR_JOBS if for_jobs else NEEDED
    calls = [_filled_call(name, args, key, channel) for name, args in needed.items()]
    # Keys of a model have a hash tag.
    calls.append(("EXISTS", keys.model("probe").leases))
    if for_jobs:
        calls += [
            _filled_call(name, NEEDED_FOR_JOBS[name], f"{ARQ_KEYS}absent", channel)
            for name in ("INCR", "INCRBY", "PSETEX")
        ]
    return calls


def _filled_call(name: str, args: tuple[Any, ...], key: str, channel: str) -> tuple[Any, ...]:
    return (name, *(key if arg is _KEY else channel if arg is _CHANNEL else arg for arg in args))


class Role(StrEnum):
    """Role of a Redis user. OPERATOR is for the commands, the dashboard and the exporter; CLIENT for apps."""

    CLIENT = "client"
    WORKER = "worker"
    GATEWAY = "gateway"
    JOBS = "jobs"
    OPERATOR = "operator"


class RedisVersion(StrEnum):
    """Versions of servers for an ACL file: version 6.2, or newer ones and Valkey."""

    V6_2 = "6.2"
    V7 = "7"


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """Patterns of keys: to read and change, to read, and to use with one command alone; and of channels."""

    changes: tuple[str, ...]
    reads: tuple[str, ...] = ()
    only: tuple[tuple[str, str], ...] = ()
    channels: tuple[str, ...]


def user_line(role: Role, namespace: str, password: str, version: RedisVersion = RedisVersion.V7) -> str:
    """Return the line of an ACL file that makes the user of a role; the password is in it as a hash.

    Raises:
        ValidationError: the namespace cannot be one.
    """
    hashed = hashlib.sha256(password.encode()).hexdigest()
    return " ".join(["user", role, "on", f"#{hashed}", *rights(role, namespace, version)])


def rights(role: Role, namespace: str, version: RedisVersion = RedisVersion.V7) -> list[str]:
    """Return the words of ``ACL SETUSER`` behind the password: channels, keys, commands."""
    reach = _REACH[role](Keys(namespace))
    commands = [*NEEDED, *_ALWAYS]
    if role is Role.JOBS:
        commands += [*NEEDED_FOR_JOBS, *_FOR_JOBS]
    if role is Role.OPERATOR:
        commands += [*NEEDED_FOR_MOVES, *NEEDED_FOR_OPERATORS]
    allowed = [f"+{_PARTS.get(name, name.lower())}" for name in sorted(set(commands))]
    channels = [f"&{pattern}" for pattern in reach.channels]
    return [
        "resetchannels",
        *channels,
        *_key_words(reach, version),
        "-@all",
        *_CONNECTION,
        *allowed,
        *_alone(reach, version),
    ]


def _key_words(reach: Reach, version: RedisVersion) -> list[str]:
    changes = [f"~{pattern}" for pattern in reach.changes]
    if version is RedisVersion.V7:
        return [*changes, *(f"%R~{pattern}" for pattern in reach.reads)]
    return [*changes, *(f"~{pattern}" for pattern in (*reach.reads, *dict.fromkeys(key for _, key in reach.only)))]


def _alone(reach: Reach, version: RedisVersion) -> list[str]:
    """Return the selectors: what a user may do with some keys, and nothing else with them."""
    if version is not RedisVersion.V7:
        return []
    return [f"(-@all +{command.lower()} ~{key})" for command, key in reach.only]


def _of_clients(keys: Keys) -> Reach:
    """Return the rights of apps. They write files, batches and adapters, and read what requests need of the rest."""
    return Reach(
        changes=(
            keys.of_all_models(),
            # Who finds that an engine beats no more drops its id; one that beats enters it again. Who asks for a model
            # first records its shard.
            *_literals(keys.absent(), keys.engines(), keys.devices(), keys.placements()),
            *_literals(keys.adapters(), keys.adapter_numbers()),
            as_literal(keys.awaited_models()),
            keys.batches().pattern,
        ),
        reads=(
            *_literals(keys.models(), keys.layouts(), keys.webhook_networks(), keys.webhooks_signed()),
            _any_with_prefix(keys.engine("")),
            _any_with_prefix(keys.device("")),
        ),
        only=(
            ("SADD", as_literal(keys.webhook_models())),
            ("XADD", as_literal(keys.audit_of_apps())),
        ),
        channels=(keys.of_all_models(),),
    )


def _of_workers(keys: Keys) -> Reach:
    return Reach(
        changes=(
            keys.of_all_models(),
            *_literals(
                keys.absent(), keys.engines(), keys.placements(), keys.models(), keys.processes(), keys.devices()
            ),
            as_literal(keys.awaited_models()),
            _any_with_prefix(keys.engine("")),
            _any_with_prefix(keys.process("")),
            _any_with_prefix(keys.device("")),
            *_literals(keys.budgets_ended(), keys.budgets_synced()),
        ),
        reads=_literals(
            keys.layouts(), keys.adapters(), keys.adapter_numbers(), keys.budgets(), keys.forgotten_models()
        ),
        channels=(keys.of_all_models(), keys.of_workers()),
    )


def _of_gateways(keys: Keys) -> Reach:
    client = _of_clients(keys)
    return Reach(
        changes=(
            *client.changes,
            *_literals(keys.processes(), keys.jobs_due(), keys.job_holders(), keys.webhook_outbox()),
            _any_with_prefix(keys.process("")),
            keys.responses(),
        ),
        # It says whether webhooks wait for a jobs process.
        reads=(*client.reads, *_literals(keys.api_keys(), keys.webhook_models(), keys.forgotten_models())),
        only=client.only,
        channels=client.channels,
    )


def _of_jobs(keys: Keys) -> Reach:
    client = _of_clients(keys)
    return Reach(
        changes=(
            *client.changes,
            as_literal(keys.processes()),
            _any_with_prefix(keys.process("")),
            _any_with_prefix(keys.jobs()),
            keys.of_webhooks(),
            f"{ARQ_KEYS}*",
        ),
        reads=(
            *_literals(keys.models(), keys.layouts(), keys.budgets(), keys.forgotten_models()),
            _any_with_prefix(keys.engine("")),
        ),
        channels=client.channels,
    )


def _of_operators(keys: Keys) -> Reach:
    return Reach(changes=(keys.of_all(),), channels=(keys.of_all(),))


_REACH: dict[Role, Callable[[Keys], Reach]] = {
    Role.CLIENT: _of_clients,
    Role.WORKER: _of_workers,
    Role.GATEWAY: _of_gateways,
    Role.JOBS: _of_jobs,
    Role.OPERATOR: _of_operators,
}


def _literals(*names: str) -> tuple[str, ...]:
    return tuple(map(as_literal, names))


def _any_with_prefix(prefix: str) -> str:
    return f"{as_literal(prefix)}*"
