"""Checks whether Penstock can use the Redis at a URL, once, when a command or a worker starts.

Every command Penstock needs is tried in a way that changes nothing (``rights.py``), because this is the only test that
works with a managed Redis, a renamed command and a restrictive ACL: COMMAND and CONFIG are often forbidden.

What a server reports may be a risk for requests. Log, ``penstock status`` and pages take these risks from here.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..errors import ConfigurationError, RedisUnavailableError, RedisUnsupportedError
from ..keys import Keys
from ..process.log import get_logger
from ..values.names import DEFAULT_NAMESPACE
from ..values.shown import mask_url
from .link import heed_cancellation, is_read_only, refuses_login
from .rights import ARQ_KEYS, probes
from .subscriber import DatabaseChannels
from .url import parse_pool

CHECK_TIMEOUT_S = 5.0
MIN_VERSION = (6, 2)
log = get_logger(__name__)
FULL_SHARE = 0.8


async def check_redis(
    url: str,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    for_worker: bool = False,
    for_jobs: bool = False,
    is_service: bool = False,
) -> None:
    """Connect to ``url`` once and verify version, commands and permissions; takes a few round trips.

    Args:
        namespace: its keys and channels are the ones whose permissions are tried.
        for_worker: refuse a server that may evict keys without a time to live, of which others only log a warning.
        for_jobs: try what arq needs, too.
        is_service: log the other risks of this server, as a worker does.

    Raises:
        RedisUnavailableError: nothing answers within ``CHECK_TIMEOUT_S``, or the password is refused.
        RedisUnsupportedError: the server is older than 6.2, is a read-only replica, or lacks or denies a command.
        ConfigurationError: the URL cannot be read, or the server evicts keys when its memory is full.
    """
    calls = probes(namespace, for_jobs=for_jobs)
    await check_server(url, calls, namespace=namespace, for_worker=for_worker, is_service=is_service)


async def check_server(
    url: str,
    calls: Sequence[tuple[Any, ...]],
    *,
    namespace: str = DEFAULT_NAMESPACE,
    for_worker: bool = False,
    is_service: bool = False,
    is_node: bool = False,
) -> None:
    """Check a server as ``check_redis`` does, but try these calls.

    Args:
        is_node: whether it may be a node of a cluster. Calls on keys of other nodes are refused there.
    """
    server = mask_url(url)
    pool = parse_pool(url, socket_connect_timeout=CHECK_TIMEOUT_S)
    connection = pool.make_connection()

    async def check() -> None:
        await connection.connect()
        info = await _read_info(connection)
        _check_version(info, server)
        if not is_node:
            _check_topology(info, server)
        await _check_risks(connection, info, server, for_worker, is_service or for_worker)
        if calls:
            named = DatabaseChannels(pool)
            channels = [Keys(namespace).model("probe").wake]
            if for_worker:
                channels.append(Keys(namespace).worker_commands("probe"))
            subscribing = ("SUBSCRIBE", *(named.in_subscription(channel.encode()) for channel in channels))
            await _check_commands(connection, namespace, server, [*map(named.in_command, calls)], subscribing)

    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            await heed_cancellation(check())
    except (RedisError, OSError, TimeoutError) as error:
        raise explain(error, url) from error
    finally:
        with suppress(RedisError, OSError):
            await connection.disconnect()


def explain(error: Exception, url: str) -> ConfigurationError:
    """Return the error that says in one sentence why the Redis at ``url`` cannot be used, and what to do."""
    server, reason = mask_url(url), str(error).split(". ")[0].rstrip(".")
    # redis-py wraps what happened while connecting, and keeps only a number of it.
    cause = error.__cause__ or error.__context__
    if refuses_login(error):
        return RedisUnavailableError(f"Redis at {server} refuses user or password ({reason}); correct them in the URL")
    if isinstance(error, MasterNotFoundError):
        return RedisUnavailableError(
            f"no Sentinel of {server} knows a live primary of that name ({reason}); check hosts, ports and name, and "
            "that the Sentinels see it"
        )
    if isinstance(error, BusyLoadingError):
        return RedisUnavailableError(f"Redis at {server} is still loading its data; try again in a moment")
    if isinstance(error, TimeoutError | RedisTimeoutError):
        reason = f"no answer within {CHECK_TIMEOUT_S:g} s"
    elif isinstance(error, ResponseError):
        return ConfigurationError(f"Redis at {server} refuses to work: {reason}")
    elif not isinstance(error, RedisConnectionError | OSError):
        return RedisUnavailableError(f"what answers at {server} is not Redis ({reason}); check host and port")
    elif isinstance(cause, ssl.SSLCertVerificationError):
        # Its errno is one of OpenSSL, which means another thing to the system.
        return RedisUnavailableError(
            f"the certificate of Redis at {server} is not trusted ({cause.verify_message}); name the authority that "
            "signed it in the URL: ?ssl_ca_certs=FILE"
        )
    elif isinstance(cause, ssl.SSLError):
        reason = f"TLS: {cause.reason}"
    elif isinstance(cause, OSError) and cause.errno:
        reason = os.strerror(cause.errno) if cause.errno > 0 else cause.strerror
    return RedisUnavailableError(
        f"no Redis can be reached at {server} ({reason}); start one there, or correct --redis-url or PENSTOCK_REDIS_URL"
    )


async def _read_info(connection: AbstractConnection) -> dict[str, str]:
    """Return INFO's fields; empty where INFO is forbidden, as the commands below are what counts."""
    (reply,) = await _run_pipelined(connection, [("INFO",)])
    if isinstance(reply, NoPermissionError):
        log.warning("redis_info_forbidden", unverified=["version", "maxmemory-policy"])
        return {}
    if isinstance(reply, Exception):
        raise reply
    return info_fields(reply)


def info_fields(reply: bytes) -> dict[str, str]:
    """Return the fields of a reply to INFO, by name."""
    lines = reply.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _check_version(info: dict[str, str], shown: str) -> None:
    match = re.match(r"(\d+)\.(\d+)", info.get("redis_version", ""))
    if match and (int(match[1]), int(match[2])) < MIN_VERSION:
        raise RedisUnsupportedError(
            f"Redis at {shown} has version {info['redis_version']}; Penstock needs 6.2 or newer (Valkey will do)"
        )


def _check_topology(info: dict[str, str], shown: str) -> None:
    """Refuse a cluster at every node: the one that has the slot of the probes answers them like any other server."""
    if info.get("cluster_enabled") == "1":
        raise _is_cluster(shown)


def _is_cluster(shown: str) -> RedisUnsupportedError:
    return RedisUnsupportedError(
        f"Redis at {shown} is a node of a cluster, which can hold models only: name it in PENSTOCK_SHARDS as "
        "redis+cluster://HOST:PORT, and give the URL of a server with cluster-enabled no for the rest"
    )


async def _check_risks(
    connection: AbstractConnection, info: dict[str, str], shown: str, for_worker: bool, is_service: bool
) -> None:
    """Log each risk once: of eviction to all, of the others to services. A worker refuses what would lose requests."""
    policy = info.get("maxmemory_policy", "noeviction")
    makes_copies = await _makes_copies(connection) if is_service and info.get("aof_enabled") == "0" else None
    risks = risks_of(info, shown, makes_copies=makes_copies)
    for risk in risks:
        if risk.code == "redis_evicts" and for_worker and not policy.startswith("volatile-"):
            raise ConfigurationError(str(risk))
    for risk in risks:
        if is_service or risk.code == "redis_evicts":
            log.warning("redis_risk", risk=risk.code, reason=str(risk))


async def _makes_copies(connection: AbstractConnection) -> bool | None:
    """Whether it has save points; None if CONFIG is forbidden."""
    (reply,) = await _run_pipelined(connection, [("CONFIG", "GET", "save")])
    return bool(reply[1]) if isinstance(reply, list) and len(reply) == 2 else None


async def _check_commands(
    connection: AbstractConnection,
    namespace: str,
    shown: str,
    calls: list[tuple[Any, ...]],
    subscribing: tuple[Any, ...],
) -> None:
    """Try what is needed; refused are all that this user may not run, with the keys and channels of the namespace."""
    for_jobs = any(str(key).startswith(ARQ_KEYS) for _, *rest in calls for key in rest[:1])
    (begun,) = await _run_pipelined(connection, [("MULTI",)])
    if isinstance(begun, Exception):
        _judge("MULTI", begun, namespace, shown, for_jobs)
        raise RedisUnsupportedError(
            f"Redis at {shown} lacks or denies MULTI, by which Penstock tries what it needs without changing anything; "
            "permit it (ACL, rename-command) or use another Redis"
        )
    replies = await _run_pipelined(connection, [*calls, ("DISCARD",)])
    calls.append(subscribing)
    replies[-1:] = await _run_pipelined(connection, calls[-1:])
    named = [str(call[0]) for call in calls]
    judged = [_judge(*pair, namespace, shown, for_jobs) for pair in zip(named, replies, strict=True)]
    refused = sorted({name for name, is_refused in zip(named, judged, strict=True) if is_refused})
    if refused:
        raise RedisUnsupportedError(
            f"Redis at {shown} lacks or denies {', '.join(refused)}, which Penstock needs; "
            "permit them (ACL, rename-command) or use another Redis"
        )


def _judge(name: str, reply: Any, namespace: str, shown: str, for_jobs: bool) -> bool:
    """Return whether the command is missing or denied; raises errors of the server as a whole."""
    if not isinstance(reply, ResponseError):
        return False
    text = str(reply)
    if isinstance(reply, NoPermissionError) and " command" not in text:
        arq = f", and ~{ARQ_KEYS}*" if for_jobs else ""
        raise RedisUnsupportedError(
            f"Redis at {shown} denies this user the keys or channels of namespace {namespace!r}; "
            f"grant it ~{namespace}:* and &{namespace}:*{arq}"
        )
    if is_read_only(reply):
        raise RedisUnsupportedError(f"Redis at {shown} is a read-only replica; give the URL of its primary")
    # redis-py 8 has classes for these, older ones have the server's words.
    if isinstance(reply, ClusterDownError | MovedError) or text.startswith(("MOVED ", "CLUSTERDOWN ")):
        raise _is_cluster(shown)
    return isinstance(reply, NoPermissionError) or "unknown command" in text.lower()


async def _run_pipelined(connection: AbstractConnection, commands: list[tuple[Any, ...]]) -> list[Any]:
    """Pipeline ``commands`` and return their replies, refusals among them as exceptions."""
    await connection.send_packed_command(connection.pack_commands(commands))
    replies: list[Any] = []
    for _ in commands:
        try:
            replies.append(await connection.read_response(disconnect_on_error=False))
        except ResponseError as error:
            replies.append(error)
    return replies


class Risk(msgspec.Struct, frozen=True, kw_only=True):
    """A setting or state of the server that may cost requests.

    Args:
        code: name of the risk in the log.
    """

    code: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


def risks_of(info: Mapping[str, str], shown: str, *, makes_copies: bool | None = None) -> list[Risk]:
    """Return the risks at one server.

    Args:
        info: INFO's fields; missing ones are not judged.
        shown: its URL without password.
        makes_copies: whether it periodically writes a copy of everything (``save``); None if unknown.
    """
    return [*_of_disk(info, shown, makes_copies), *_of_memory(info, shown), *_of_role(info, shown)]


def _of_disk(info: Mapping[str, str], shown: str, makes_copies: bool | None) -> list[Risk]:
    risks = []
    if info.get("aof_enabled") == "0":
        losses = {
            True: "what was accepted since its last copy, which it makes now and then",
            False: "every request that was accepted, and every result",
            None: "what was accepted since its last copy, or everything if it makes none",
        }[makes_copies]
        risks.append(
            Risk(
                code="redis_not_persistent",
                message=f"Redis at {shown} has no append-only file: a crash of it loses {losses}",
                remedy="run 'CONFIG SET appendonly yes' there",
            )
        )
    if info.get("aof_last_write_status", "ok") != "ok":
        risks.append(
            Risk(
                code="redis_cannot_write",
                message=f"Redis at {shown} cannot write its append-only file, and refuses writes until it can",
                remedy="make room on its disk",
            )
        )
    return risks


def _of_memory(info: Mapping[str, str], shown: str) -> list[Risk]:
    most, used, policy = (
        int_of_field(info, "maxmemory"),
        int_of_field(info, "used_memory"),
        info.get("maxmemory_policy"),
    )
    risks = []
    if not most:
        return risks
    if policy not in (None, "noeviction"):
        drops = f"Redis at {shown} drops keys when its memory is full (maxmemory-policy is {policy})"
        if policy.startswith("volatile-"):
            # What waits, runs, is configured or parked has no time to live. Servers that others run have no other.
            what = (
                ": results before their time, what counts towards quotas, heartbeats, and the first of several "
                "answers that a webhook is to tell of together, but no request that waits or runs"
            )
            remedy = "where it can be set, 'maxmemory-policy noeviction' keeps them"
        else:
            what, remedy = ", which would lose requests", "run 'CONFIG SET maxmemory-policy noeviction' there"
        risks.append(Risk(code="redis_evicts", message=drops + what, remedy=remedy))
    if used > FULL_SHARE * most:
        risks.append(
            Risk(
                code="redis_nearly_full",
                message=f"Redis at {shown} uses {used / most:.0%} of its memory; when it is full, requests are refused",
                remedy="raise maxmemory, or keep results for a shorter time",
            )
        )
    return risks


def _of_role(info: Mapping[str, str], shown: str) -> list[Risk]:
    """Return the risk of a writable replica, as with ``replica-read-only no``; others refuse to work at all."""
    if info.get("role") != "slave":
        return []
    return [
        Risk(
            code="redis_is_replica",
            message=f"Redis at {shown} is a replica: what is written there is lost when it meets its primary again",
            remedy="give the URL of the primary, or of Sentinels",
        )
    ]


def int_of_field(info: Mapping[str, str], name: str) -> int:
    """Return a field that is a whole number; 0 if it is missing."""
    text = info.get(name, "0")
    return int(text) if text.isdecimal() else 0
