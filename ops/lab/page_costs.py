"""``python -m penstock.ops.lab.page_costs``: measures the cost of each page for Redis, with many tenants.

A private Redis gets 100,000 waiting requests of 10,000 tenants, and heartbeats of engines. Then each page is read many
times, as the watcher reads it. The figure is the CPU time of the server itself, so it does not depend on this process.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import msgspec

from ...producer.inputs.prompt import build_request, encode_request
from ...shared.broker import Broker
from ...shared.broker.admission import Entry
from ...shared.connection import CommandConnection
from ...shared.deployment.records import EngineHeartbeat, ModelCard
from ...shared.keys import Keys
from ...shared.messages.supervision import EngineState
from ...shared.params.sampling import SamplingParams
from ...shared.process.command_line import format_table
from ...shared.queue.policy import QueuePolicy
from ...shared.redis_access.check import info_fields
from ...shared.redis_access.embedded import EmbeddedRedis
from ..dashboard.app import dashboard
from ..views.access import Access
from ..views.page import Page, Params
from ..views.pages import PAGES
from ..views.source import PageSnapshot, Source

MODEL = "m"
GOAL_MS = 20.0
NUM_ENGINES = 32
PART = 500
# Queries of each page. Pages of single items that do not exist here are left out.
_QUERIES: dict[str, tuple[dict[str, str], ...]] = {
    "overview": ({}, {"span": "7d"}),
    "queue": ({"model": MODEL}, {"model": MODEL, "span": "7d"}),
    "requests": (
        {"model": MODEL},
        {"model": MODEL, "state": "failed"},
        {"model": MODEL, "tenant": "tenant-7"},
        {"model": MODEL, "prefix": "none-begins-so"},
    ),
    "tenant": ({"model": MODEL, "tenant": "tenant-7"},),
    "request": ({"model": MODEL, "id": "request-7"},),
}
_OF_ONE_THING = ("policy", "parked", "webhook")


async def fill(connection: CommandConnection, keys: Keys, num_tenants: int, num_requests: int) -> None:
    """Put requests in line, spread over the tenants, and say that engines serve the model."""
    card = ModelCard(model=MODEL)
    await connection.execute("HSET", keys.models(), MODEL, msgspec.json.encode(card))
    for number in range(NUM_ENGINES):
        engine_id = f"host-{number}-0"
        beat = EngineHeartbeat(
            worker_id=f"host-{number}",
            engine_id=engine_id,
            model=MODEL,
            state=EngineState.BUSY,
            host="host",
            worker_pid=1,
            core_pid=2,
        )
        await connection.execute("SET", keys.engine(engine_id), msgspec.json.encode(beat))
        await connection.execute("SADD", keys.engines(), engine_id)
    broker = Broker(connection, keys.model(MODEL))
    payload = encode_request(build_request("hello", SamplingParams(), card=card, options={"request_id": "r"}))
    for start in range(0, num_requests, PART):
        ids = range(start, min(start + PART, num_requests))
        entries = [
            Entry(
                request_id=f"request-{i}",
                payload=payload,
                result_ttl_ms=3_600_000,
                tenant=f"tenant-{i % num_tenants}",
                num_prompt_tokens=100,
                max_tokens=100,
            )
            for i in ids
        ]
        await broker.enqueue_many(entries)


async def look(source: Source, page: Page, params: Params, num_looks: int) -> tuple[float, float]:
    """Return milliseconds of the server's CPU and of wall time per read, averaged over many successive reads.

    Values cached for seconds are read only once in all of them, so measure a single read as well.
    """
    access = Access("", sees_contents=True)
    source.clear_cache()
    cpu_s, started = await _cpu_s(source.connection), time.perf_counter()
    for _ in range(num_looks):
        snapshot = PageSnapshot(source)
        await page.read(snapshot, params, access)
        await snapshot.close()
    wall_s = time.perf_counter() - started
    return 1000 * (await _cpu_s(source.connection) - cpu_s) / num_looks, 1000 * wall_s / num_looks


async def _cpu_s(connection: CommandConnection) -> float:
    info = info_fields(await connection.execute("INFO"))
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


async def measure(url: str, num_tenants: int, num_requests: int, num_looks: int) -> float:
    """Print a line for each page; returns the most ms of Redis that one took."""
    app = dashboard(url)
    async with app.router.lifespan_context(app):
        source: Source = app.state.runtime.source
        await (await source.queue(MODEL)).configure(QueuePolicy(max_queue_depth=None))
        await fill(source.connection, source.keys, num_tenants, num_requests)
        queue = await source.queue(MODEL)
        depth, names = (await queue.stats()).depth, await queue.tenants()
        print(f"{depth} requests of {len(names)} tenants wait; {NUM_ENGINES} engines")
        rows, most = [], 0.0
        for page in PAGES:
            if not page.live or page.name in _OF_ONE_THING:
                continue
            for params in _QUERIES.get(page.name, ({},)):
                first_ms, _ = await look(source, page, params, 1)
                redis_ms, wall_ms = await look(source, page, params, num_looks)
                most = max(most, redis_ms)
                query = " ".join(f"{name}={value}" for name, value in params.items())
                rows.append((page.name, query, f"{first_ms:.2f}", f"{redis_ms:.2f}", f"{wall_ms:.2f}"))
        print(format_table(("PAGE", "QUERY", "FIRST LOOK, REDIS MS", "REDIS MS", "WALL MS"), rows))
        return most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--looks", type=int, default=100)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder, EmbeddedRedis.start(Path(folder)) as redis:
        most = asyncio.run(measure(redis.url, arguments.tenants, arguments.requests, arguments.looks))
    print(f"the dearest look takes {most:.1f} ms of Redis; the goal is {GOAL_MS:.0f}")
    return 0 if most <= GOAL_MS else 1


if __name__ == "__main__":
    raise SystemExit(main())
