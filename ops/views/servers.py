"""The Redis servers and the processes of a deployment: state, risky settings, slow calls, missing processes.

The arguments of slow calls are left out, since they may contain prompts.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from ...producer.control.deployment import Finding, count_due, jobs_findings
from ...shared.broker.script import SCRIPTS
from ...shared.connection import CommandConnection
from ...shared.deployment.presence import ProcessRecord, read_processes
from ...shared.errors import RedisUnavailableError
from ...shared.redis_access.check import Risk, info_fields, int_of_field, risks_of
from .source import PATIENCE_S, PageSnapshot

MOST_SLOW_CALLS = 20
# Slow logs change slowly.
SLOW_CACHED_S = 10.0
# Overdue work is reported only after it has been due for seconds, so a count may be that old.
DUE_CACHED_S = 5.0


@dataclass(frozen=True)
class Server:
    """A server. ``info`` has the fields of INFO; empty if INFO is forbidden or the server is unreachable."""

    url: str
    models: tuple[str, ...]
    info: dict[str, str]
    error: str = ""
    risks: list[Risk] = field(default_factory=list)

    @property
    def row(self) -> dict[str, Any]:
        """Row of the page's table."""
        info = self.info
        return {
            "redis": self.url,
            "holds": ", ".join(self.models) or "home",
            "version": info.get("redis_version", ""),
            "role": info.get("role", ""),
            "uptime_s": int_of_field(info, "uptime_in_seconds"),
            "used_memory_bytes": int_of_field(info, "used_memory"),
            "maxmemory_bytes": int_of_field(info, "maxmemory"),
            "maxmemory_policy": info.get("maxmemory_policy", ""),
            "aof": {"1": "on", "0": "off"}.get(info.get("aof_enabled", ""), "not known"),
            "aof_last_write": info.get("aof_last_write_status", ""),
            "clients": int_of_field(info, "connected_clients"),
            "commands_per_s": int_of_field(info, "instantaneous_ops_per_sec"),
            "evicted_keys": int_of_field(info, "evicted_keys"),
            "error": self.error,
        }


async def read_servers(snapshot: PageSnapshot) -> list[Server]:
    """Return the home server and the servers that hold models, each once."""
    return await snapshot.once("servers", lambda: _read_all(snapshot))


async def links_of(snapshot: PageSnapshot) -> list[tuple[CommandConnection, list[str]]]:
    """Return a connection to each server with the names of its models, the home server first."""
    source = snapshot.source
    home = source.connection
    links: dict[int, tuple[CommandConnection, list[str]]] = {id(home): (home, [])}
    for model in await snapshot.models():
        for broker in await source.brokers(model):
            link = home.link_to(broker.keys.queue)
            links.setdefault(id(link), (link, []))[1].append(broker.keys.name)
    return list(links.values())


async def _read_all(snapshot: PageSnapshot) -> list[Server]:
    links = await links_of(snapshot)
    return list(await asyncio.gather(*(_read_server(link, tuple(models)) for link, models in links)))


async def _read_server(link: CommandConnection, models: tuple[str, ...]) -> Server:
    try:
        async with asyncio.timeout(PATIENCE_S):
            info = info_fields(await link.execute("INFO"))
    except (TimeoutError, RedisUnavailableError):
        return Server(link.shown_url, models, {}, "does not answer", [_away(link)])
    except RedisError as error:
        return Server(link.shown_url, models, {}, f"INFO is refused: {error}")
    return Server(link.shown_url, models, info, "", risks_of(info, link.shown_url))


def _away(link: CommandConnection) -> Risk:
    message = f"Redis {link.shown_url} does not answer"
    return Risk(code="model_away", message=message, remedy="its requests wait until it is back")


async def read_slow(snapshot: PageSnapshot) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the newest slow calls of all servers, and a sentence for each server that refuses to list them."""

    async def read_calls() -> tuple[list[dict[str, Any]], list[str]]:
        links = [link for link, _ in await links_of(snapshot)]
        replies = await asyncio.gather(*(_read_slow_log(link, snapshot.source.keys.namespace) for link in links))
        calls = sorted((call for calls, _ in replies for call in calls), key=lambda call: -call["at"])
        return calls[:MOST_SLOW_CALLS], [sentence for _, sentence in replies if sentence]

    return await snapshot.source.cached("slow", SLOW_CACHED_S, read_calls)


async def _read_slow_log(link: CommandConnection, namespace: str) -> tuple[list[dict[str, Any]], str]:
    try:
        async with asyncio.timeout(PATIENCE_S):
            entries = await link.execute("SLOWLOG", "GET", MOST_SLOW_CALLS)
    except (TimeoutError, RedisUnavailableError):
        return [], ""  # ``read_servers`` reports that it is unreachable
    except RedisError as error:
        return [], f"Redis {link.shown_url} does not list slow calls: {error}"
    scripts = {link.script_here(script).sha.encode(): name for name, script in SCRIPTS.items()}
    return [_slow_call(link.shown_url, entry, namespace, scripts) for entry in entries], ""


def _slow_call(url: str, entry: list[Any], namespace: str, scripts: dict[bytes, str]) -> dict[str, Any]:
    _, at, micros, words, *_ = entry
    command = words[0].decode(errors="replace").upper()
    is_script = command in ("EVALSHA", "EVAL")
    # Arguments of a script: its hash, the number of keys, the keys.
    keys = words[3:4] if is_script else words[1:2]
    key = keys[0].decode(errors="replace") if keys else ""
    return {
        "redis": url,
        "at": at,
        "took_s": micros / 1e6,
        "command": command,
        # The first call of a script sends its text, which the log truncates.
        "script": scripts.get(words[1], "another") if command == "EVALSHA" else "",
        "key": key if key.startswith(f"{namespace}:") else "",
    }


async def processes_of(snapshot: PageSnapshot) -> list[ProcessRecord]:
    """Return the processes that report themselves, sorted by kind and start."""
    source = snapshot.source
    return await snapshot.once("processes", lambda: read_processes(source.connection.execute, source.keys))


async def missing_processes(snapshot: PageSnapshot) -> list[Finding]:
    """Return findings about due work that no process is running for."""
    source = snapshot.source

    async def read_due() -> dict[str, int]:
        return await source.cached("due", DUE_CACHED_S, lambda: count_due(source.connection, source.keys))

    return jobs_findings(await processes_of(snapshot), await snapshot.once("due", read_due))
