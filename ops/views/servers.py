"""State of the Redis servers as INFO reports it, and settings that endanger requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from ...shared.connection import CommandConnection
from ...shared.errors import RedisUnavailableError
from ...shared.redis_access.check import info_fields, number, risks_of
from .source import PATIENCE_S, PageSnapshot


@dataclass(frozen=True)
class Server:
    """A server. ``info`` has the fields of INFO; empty if INFO is forbidden or the server is unreachable."""

    url: str
    models: tuple[str, ...]
    info: dict[str, str]
    error: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def row(self) -> dict[str, Any]:
        """Row of the page's table."""
        info = self.info
        return {
            "redis": self.url,
            "holds": ", ".join(self.models) or "home",
            "version": info.get("redis_version", ""),
            "role": info.get("role", ""),
            "uptime_s": number(info, "uptime_in_seconds"),
            "used_memory_bytes": number(info, "used_memory"),
            "maxmemory_bytes": number(info, "maxmemory"),
            "maxmemory_policy": info.get("maxmemory_policy", ""),
            "aof": {"1": "on", "0": "off"}.get(info.get("aof_enabled", ""), "not known"),
            "aof_last_write": info.get("aof_last_write_status", ""),
            "clients": number(info, "connected_clients"),
            "commands_per_s": number(info, "instantaneous_ops_per_sec"),
            "evicted_keys": number(info, "evicted_keys"),
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
        return Server(link.shown_url, models, {}, "does not answer", [f"Redis {link.shown_url} does not answer"])
    except RedisError as error:
        return Server(link.shown_url, models, {}, f"INFO is refused: {error}")
    return Server(link.shown_url, models, info, "", [str(risk) for risk in risks_of(info, link.shown_url)])
