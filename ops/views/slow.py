"""Slow calls from the slow logs of the Redis servers. Arguments are left out, since they may contain prompts."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.exceptions import RedisError

from ...shared.broker.script import SCRIPTS
from ...shared.connection import CommandConnection
from ...shared.errors import RedisUnavailableError
from .servers import links_of
from .source import PATIENCE_S, PageSnapshot

MOST_SHOWN = 20
# Slow logs change slowly.
CACHED_S = 10.0


async def read_slow(snapshot: PageSnapshot) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the newest slow calls of all servers, and a sentence for each server that refuses to list them."""

    async def read() -> tuple[list[dict[str, Any]], list[str]]:
        links = [link for link, _ in await links_of(snapshot)]
        replies = await asyncio.gather(*(_read_server(link, snapshot.source.keys.namespace) for link in links))
        calls = sorted((call for calls, _ in replies for call in calls), key=lambda call: -call["at"])
        return calls[:MOST_SHOWN], [sentence for _, sentence in replies if sentence]

    return await snapshot.source.cached("slow", CACHED_S, read)


async def _read_server(link: CommandConnection, namespace: str) -> tuple[list[dict[str, Any]], str]:
    try:
        async with asyncio.timeout(PATIENCE_S):
            entries = await link.execute("SLOWLOG", "GET", MOST_SHOWN)
    except (TimeoutError, RedisUnavailableError):
        return [], ""  # ``read_servers`` reports that it is unreachable
    except RedisError as error:
        return [], f"Redis {link.shown_url} does not list slow calls: {error}"
    scripts = {link.script_here(script).sha.encode(): name for name, script in SCRIPTS.items()}
    return [_call(link.shown_url, entry, namespace, scripts) for entry in entries], ""


def _call(url: str, entry: list[Any], namespace: str, scripts: dict[bytes, str]) -> dict[str, Any]:
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
