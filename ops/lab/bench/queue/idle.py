"""Cost of an idle `worker start` for Redis, and delay until it claims a request.

Both are measured with MONITOR, in the server's own time. Commands inside a script are not counted as calls, but show
when it did its work: a request is claimed when ``claim`` writes it into its engine's claims.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from random import Random

import msgspec
import redis.asyncio
from redis.asyncio.client import Monitor

from .....producer import Client, SamplingParams
from .....shared.broker import SCRIPTS
from .....shared.redis_access.url import parse_pool
from ....demo.run import MODEL
from ....local.stack import LocalStack
from ....statistics import percentile

WATCH_S = 10.0
# Scripts are sent by their text at their first use only.
SETTLE_S = 2.0
NUM_WAKES = 50
PAUSE_S = (0.1, 0.4)
TIMEOUT_S = 30.0
PROMPT = "four plus two is"

_NAME_OF: dict[str, str] = {script.sha: script.name for script in SCRIPTS.values()}


class IdleRow(msgspec.Struct, kw_only=True):
    """Calls by command (a script by its name) in ``watch_s``, and the ms from a request's enqueue to its claim."""

    watch_s: float
    calls: dict[str, int]
    calls_per_s: float
    num_wakes: int
    wake_p50_ms: float
    wake_p99_ms: float
    wake_max_ms: float


def measure_idle(watch_s: float = WATCH_S, num_wakes: int = NUM_WAKES) -> IdleRow:
    """Watch an idle engine of the demo model, then wake it ``num_wakes`` times."""
    options = ["--device", "cpu", "--served-model-name", "demo", "--log-level", "error"]
    with LocalStack(MODEL, options) as stack:
        calls, wakes_ms = asyncio.run(_measure_idle(stack.url, watch_s, num_wakes))
    return IdleRow(
        watch_s=watch_s,
        calls=dict(calls.most_common()),
        calls_per_s=calls.total() / watch_s,
        num_wakes=len(wakes_ms),
        wake_p50_ms=percentile(wakes_ms, 0.5),
        wake_p99_ms=percentile(wakes_ms, 0.99),
        wake_max_ms=max(wakes_ms),
    )


async def _measure_idle(url: str, watch_s: float, num_wakes: int) -> tuple[Counter[str], list[float]]:
    server = redis.asyncio.Redis.from_pool(parse_pool(url))
    try:
        async with Client.connect(url, model="demo") as client:
            # The first request of an engine is slower, and is not measured.
            await client.generate(PROMPT, SamplingParams(max_tokens=1))
        await asyncio.sleep(SETTLE_S)
        async with server.monitor() as monitor:
            calls = await _count_calls(monitor, watch_s)
        async with Client.connect(url, model="demo") as client, server.monitor() as monitor:
            wakes_ms = await _time_wakes(client, monitor, num_wakes)
    finally:
        await server.aclose()
    return calls, wakes_ms


async def _count_calls(monitor: Monitor, watch_s: float) -> Counter[str]:
    calls: Counter[str] = Counter()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(watch_s):
            while True:
                command = await monitor.next_command()
                if command["client_type"] != "lua":
                    name, _, rest = command["command"].partition(" ")
                    calls[_NAME_OF.get(rest.partition(" ")[0]) or name.upper()] += 1
    return calls


async def _time_wakes(client: Client, monitor: Monitor, num_wakes: int) -> list[float]:
    """Send one request after the other to an idle worker, at moments that have nothing to do with its polls."""
    random = Random(0)
    delays_ms: list[float] = []
    for number in range(num_wakes):
        await asyncio.sleep(random.uniform(*PAUSE_S))
        request_id = f"wake-{number}"
        watching = asyncio.create_task(_time_to_claim(monitor, request_id))
        await client.generate(PROMPT, SamplingParams(max_tokens=1), request_id=request_id)
        async with asyncio.timeout(TIMEOUT_S):
            delays_ms.append(await watching * 1000)
    return delays_ms


async def _time_to_claim(monitor: Monitor, request_id: str) -> float:
    """Seconds from the call that enqueues a request to the write by which an engine holds it."""
    enqueued_at: float | None = None
    while True:
        command = await monitor.next_command()
        words = command["command"].split(" ")
        if enqueued_at is None:
            if command["client_type"] != "lua" and SCRIPTS["enqueue"].sha in words:
                enqueued_at = command["time"]
        elif words[0].upper() == "HSET" and ":claims:" in words[1] and request_id in words:
            return command["time"] - enqueued_at
