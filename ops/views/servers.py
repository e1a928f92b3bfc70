"""What the Redis servers say of themselves, and what of it endangers requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from ...shared.connection import CommandConnection
from ...shared.errors import RedisUnavailableError
from ...shared.redis_access.check import info_fields
from ...shared.redis_access.risks import number, risks_of
from .source import PATIENCE_S, Moment


@dataclass(frozen=True)
class Server:
    """One server. ``info`` holds INFO's fields, empty if they are forbidden or it is away."""

    url: str
    models: tuple[str, ...]
    info: dict[str, str]
    error: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def row(self) -> dict[str, Any]:
        """What the page and its table tell."""
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


async def read_servers(moment: Moment) -> list[Server]:
    """Return the home server and those that hold models, once each."""
    return await moment.once("servers", lambda: _read(moment))


async def links_of(moment: Moment) -> list[tuple[CommandConnection, list[str]]]:
    """Return a connection to each server, the home one first, and the names of the models that it holds."""
    source = moment.source
    home = source.connection
    links: dict[int, tuple[CommandConnection, list[str]]] = {id(home): (home, [])}
    for model in await moment.models():
        for broker in await source.brokers(model):
            link = home.link_to(broker.keys.queue)
            links.setdefault(id(link), (link, []))[1].append(broker.keys.name)
    return list(links.values())


async def _read(moment: Moment) -> list[Server]:
    links = await links_of(moment)
    return list(await asyncio.gather(*(_ask(link, tuple(models)) for link, models in links)))


async def _ask(link: CommandConnection, models: tuple[str, ...]) -> Server:
    try:
        async with asyncio.timeout(PATIENCE_S):
            info = info_fields(await link.execute("INFO"))
    except (TimeoutError, RedisUnavailableError):
        return Server(link.shown_url, models, {}, "does not answer", [f"Redis {link.shown_url} does not answer"])
    except RedisError as error:
        return Server(link.shown_url, models, {}, f"INFO is refused: {error}")
    return Server(link.shown_url, models, info, "", [str(risk) for risk in risks_of(info, link.shown_url)])
