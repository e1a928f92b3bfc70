"""What runs and what waits: by engine, by tenant, and by id."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ....shared.connection import CommandConnection
from ....shared.keys import ModelKeys
from ....shared.queue_stats import RequestStatus
from ..access import Access
from ..page import Page, Params, Room, View
from ..source import Moment

MOST_SHOWN = 50


async def _read(moment: Moment, params: Params, _: Access) -> View:
    models = list(await moment.models())
    model = (await moment.check_model(params["model"])).model if params.get("model") else next(iter(models), "")
    if not model:
        return {"model": "", "models": [], "rows": [], "num_running": 0, "facts": {}}
    running = await _running(moment, model)
    waiting = await _waiting(moment, model, params)
    shown = [*running[:MOST_SHOWN], *waiting[:MOST_SHOWN]]
    queue = await moment.queue(model)
    found = await asyncio.gather(
        *(moment.once(("status", model, one), lambda one=one: queue.status(one)) for one in shown)
    )
    rows = [_row(model, status) for status in found if status is not None]
    return {
        "model": model,
        "models": models,
        "rows": rows,
        "num_running": len(running),
        "most": MOST_SHOWN,
        "facts": {"running": len(running)},
    }


async def _running(moment: Moment, model: str) -> list[str]:
    """Ids of what the engines hold."""
    engines = [engine.engine_id for engine in await moment.engines() if engine.model == model]
    brokers = await moment.source.brokers(model)
    claims = await asyncio.gather(*(broker.claims(engine) for broker in brokers for engine in engines))
    return [request_id for held in claims for request_id, _ in held]


async def _waiting(moment: Moment, model: str, params: Params) -> list[str]:
    """The first that wait: those that are to go on, then those of a tenant, or of the tenants that wait longest."""
    bands, tenant = (await (await moment.queue(model)).policy()).bands, params.get("tenant", "")
    connection, brokers = moment.source.connection, await moment.source.brokers(model)
    parts = await asyncio.gather(*(_waiting_in(connection, broker.keys, bands, tenant) for broker in brokers))
    return [one.decode(errors="replace") for part in parts for one in part]


async def _waiting_in(
    connection: CommandConnection, keys: ModelKeys, bands: Sequence[str], tenant: str
) -> Sequence[bytes]:
    """Those of one partition."""
    ids: list[bytes] = []
    for line in (keys.suspects, keys.returned):
        ids += await connection.execute("LRANGE", line, 0, MOST_SHOWN - 1)
    for band in bands:
        left = MOST_SHOWN - len(ids)
        if left <= 0:
            break
        oldest = [] if tenant else await connection.execute("ZRANGE", keys.heads(band), 0, left - 1)
        tenants = [tenant] if tenant else [name.decode() for name in oldest]
        of_each = -(-left // max(1, len(tenants)))
        lanes = await asyncio.gather(*(_of_lane(connection, keys.lane(band, name), of_each) for name in tenants))
        ids += [one for lane in lanes for one in lane][:left]
    return ids


async def _of_lane(connection: CommandConnection, lane: str, count: int) -> Sequence[bytes]:
    entries = await connection.execute("XRANGE", lane, "-", "+", "COUNT", count)
    fields = (dict(zip(pairs[::2], pairs[1::2], strict=False)) for _, pairs in entries)
    return [one[b"id"] for one in fields if b"id" in one]


def _row(model: str, status: RequestStatus) -> dict[str, Any]:
    return {
        "request": status.request_id,
        "model": model,
        "state": status.state.value,
        "tenant": status.tenant,
        "band": status.band,
        "engine": status.engine_id,
        "position": status.position,
        "estimated_start_s": status.estimated_start_s,
        "output_tokens": status.num_output_tokens,
        "attempts": status.num_attempts,
    }


ROOM = Room((Page("requests", "/requests", "Requests · {model}", _read, query=("model", "tenant"), nav="Requests"),))
