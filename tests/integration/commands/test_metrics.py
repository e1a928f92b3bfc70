"""`penstock metrics` on a real Redis: with a queue and no engine, with engines, and with a Redis that goes away."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from penstock.ops.lab.metrics_table import table
from penstock.ops.metrics.app import build_app
from penstock.ops.metrics.snapshot import Snapshot
from penstock.ops.metrics.wanted import WantedOptions
from penstock.producer import Client, SamplingParams
from penstock.shared.broker import Broker, EngineCapacity, FinalRecord
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.presence import ProcessKind, read_processes
from penstock.shared.deployment.records import EngineHeartbeat, ModelCard
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.devices import DeviceModel, DeviceRecord
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.messages.supervision import EngineState
from penstock.shared.metrics.exposition import MetricNames
from penstock.shared.partitions.budgets import BudgetStore
from penstock.shared.queue.budgets import Budget
from penstock.shared.stats import EngineStats

from ...redis_server import DEADLINE_S, RedisServer

PAGE = Path(__file__).parents[3] / "ops" / "guide" / "operating" / "metrics.md"
REFRESH_S = 0.02


@pytest.fixture
async def http(server: RedisServer) -> AsyncIterator[httpx.AsyncClient]:
    snapshot = Snapshot(server.url, {}, Keys(), WantedOptions(), refresh_s=REFRESH_S)
    app = build_app(snapshot, MetricNames.VLLM)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://metrics") as http,
    ):
        yield http


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[Client]:
    async with Client.connect(server.url) as client:
        yield client


async def serve(url: str, state: EngineState, *, num_running_reqs: int = 0, kv_cache_usage: float = 0.0) -> None:
    """Leave the card and the heartbeat of an engine, as a worker does."""
    commands, keys = CommandConnection(url), Keys()
    stats = EngineStats(num_finished={"stop": 3}, num_output_tokens=77)
    stats.time_to_first_token_s.observe(0.2, 4)
    beat = EngineHeartbeat(
        worker_id="w",
        engine_id="e",
        model="m",
        state=state,
        host="h",
        worker_pid=1,
        core_pid=2,
        stats=stats,
        num_running_reqs=num_running_reqs,
        kv_cache_usage=kv_cache_usage,
    )
    await commands.execute("HSET", keys.models(), "m", msgspec.json.encode(ModelCard(model="m", max_model_len=1000)))
    await commands.execute("SADD", keys.engines(), "e")
    await commands.execute("SET", keys.engine("e"), msgspec.json.encode(beat))
    await commands.close()


async def until_told(http: httpx.AsyncClient, *lines: str) -> str:
    """Scrape until all lines are there."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            text = (await http.get("/metrics")).text
            if all(line in text.splitlines() for line in lines):
                return text
            await asyncio.sleep(REFRESH_S)


async def test_a_queue_has_metrics_while_no_engine_runs(
    server: RedisServer, http: httpx.AsyncClient, client: Client
) -> None:
    await serve(server.url, EngineState.STOPPED)
    await until_told(http, 'penstock_wanted_engines{model_name="m"} 0.0')
    assert (await http.get("/wanted/m")).json()["replicas"] == 0
    await client.submit("hi", SamplingParams(max_tokens=10), model="m")
    told = 'penstock_num_requests_waiting{model_name="m"} 1.0', 'penstock_wanted_engines{model_name="m"} 1.0'
    text = await until_told(http, *told, "penstock_snapshot_ok 1.0", 'penstock_redis_up{server="home"} 1.0')
    assert 'vllm:num_requests_waiting{model_name="m"} 1.0' in text
    assert 'penstock_queue_waiting_requests{band="standard",model_name="m"} 1.0' in text
    assert 'penstock_dead_letter_requests{model_name="m"} 0.0' in text
    assert 'penstock_webhook_deliveries{state="pending"} 0.0' in text
    assert (await http.get("/wanted")).json() == [
        {"model": "m", "replicas": 1, "wanted_engines": 1.0, "num_engines": 0}
    ]
    commands = CommandConnection(server.url)
    (process,) = await read_processes(commands.execute, Keys())
    await commands.close()
    assert process.kind == ProcessKind.EXPORTER
    # What waits in a queue that is paused waits for a person.
    await client.pause_generation(model="m")
    await until_told(http, 'penstock_wanted_engines{model_name="m"} 0.0')


async def test_usage_has_a_bounded_number_of_labels(server: RedisServer, http: httpx.AsyncClient) -> None:
    await serve(server.url, EngineState.READY)
    commands, keys = CommandConnection(server.url), Keys()
    broker = Broker(commands, keys.model("m"))
    for number in range(52):
        await broker.enqueue(f"r{number}", b"p", result_ttl_ms=60_000, tenant=f"t{number:02}")
        (claim,) = (await broker.claim("e", EngineCapacity(max_num_seqs=1))).claims
        delta = Delta(token_ids=[1] * (100 - number), finish_reason=FinishReason.STOP, usage=Usage(10, 100 - number))
        assert await broker.finish([FinalRecord(f"r{number}", claim.epoch, delta)]) == []
    await BudgetStore(commands, keys).set_budget(Budget(tenant="t00", limit=220.0))
    await commands.close()
    text = await until_told(
        http,
        'penstock_tenant_tokens_today{kind="output",model_name="m",tenant="t00"} 100.0',
        'penstock_tenant_tokens_today{kind="output",model_name="m",tenant="*"} 99.0',
        'penstock_budget_used_share{key="",period="month",tenant="t00"} 0.5',
    )
    assert text.count('penstock_tenant_tokens_today{kind="output"') == 51


async def test_an_engine_is_requested_for_a_model_that_no_worker_has_served(
    server: RedisServer, http: httpx.AsyncClient
) -> None:
    async with Client.connect(server.url, wait_for_model=True) as client:
        await client.submit("hi", SamplingParams(max_tokens=10), model="org/new")
        await until_told(http, 'penstock_wanted_engines{model_name="org/new"} 1.0')
    reply = (await http.get("/wanted/org/new")).json()
    assert reply == {"model": "org/new", "replicas": 1, "wanted_engines": 1.0, "num_engines": 0}


async def test_a_sleeping_model_wants_an_engine_and_its_device_has_metrics(
    server: RedisServer, http: httpx.AsyncClient, client: Client
) -> None:
    await serve(server.url, EngineState.SLEEPING)
    commands, keys = CommandConnection(server.url), Keys()
    device = DeviceRecord(
        device_id="w/cpu", worker_id="w", host="h", device="cpu", models=[DeviceModel(name="m", phase="on disk")]
    )
    await commands.execute("SADD", keys.devices(), "w/cpu")
    await commands.execute("SET", keys.device("w/cpu"), msgspec.json.encode(device))
    await commands.close()
    await client.submit("hi", SamplingParams(max_tokens=10), model="m")
    await until_told(
        http,
        'penstock_wanted_engines{model_name="m"} 1.0',
        'penstock_model_state{device="h/cpu",model_name="m",state="on disk"} 1.0',
    )


async def test_engines_have_metrics_under_vllms_names_too(server: RedisServer, http: httpx.AsyncClient) -> None:
    await serve(server.url, EngineState.BUSY, num_running_reqs=5, kv_cache_usage=0.4)
    text = await until_told(http, 'penstock_num_requests_running{engine="e",model_name="m"} 5.0')
    for line in (
        'vllm:num_requests_running{engine="e",model_name="m"} 5.0',
        'vllm:generation_tokens_total{engine="e",model_name="m"} 77.0',
        'vllm:request_success_total{engine="e",finished_reason="stop",model_name="m"} 3.0',
        'vllm:time_to_first_token_seconds_count{engine="e",model_name="m"} 4.0',
        'vllm:time_to_first_token_seconds_bucket{engine="e",le="0.25",model_name="m"} 4.0',
        'penstock_engine_state{engine="e",model_name="m",state="busy"} 1.0',
        'penstock_engine_state{engine="e",model_name="m",state="ready"} 0.0',
        'penstock_wanted_engines{model_name="m"} 0.5',
    ):
        assert line in text.splitlines()
    assert "vllm:engine_up" not in text


async def test_a_scrape_does_not_wait_for_a_redis_that_is_away(server: RedisServer, http: httpx.AsyncClient) -> None:
    await serve(server.url, EngineState.READY, kv_cache_usage=0.8)
    wanted = 'penstock_wanted_engines{model_name="m"} 1.0'
    await until_told(http, "penstock_snapshot_ok 1.0", wanted)
    assert (await http.get("/readyz")).status_code == 200
    server.kill()
    text = await until_told(http, "penstock_snapshot_ok 0.0", 'penstock_redis_up{server="home"} 0.0')
    assert "penstock_snapshot_age_seconds" in text
    assert (await http.get("/readyz")).status_code == 503
    assert (await http.get("/healthz")).status_code == 200
    # The signal stays what it was: an autoscaler must not take engines away because nobody answers.
    assert wanted in text
    assert (await http.get("/wanted/m")).json()["num_engines"] == 1
    server.start()
    await until_told(http, "penstock_snapshot_ok 1.0")


async def test_an_unknown_model_is_a_404(http: httpx.AsyncClient) -> None:
    reply = await http.get("/wanted/org/unknown")
    assert reply.status_code == 404
    assert "org/unknown" in reply.json()["error"]


def test_the_program_begins_before_redis(tmp_path: Path) -> None:
    url = f"unix://{tmp_path / 'nobody.sock'}"
    command = [sys.executable, "-m", "penstock.ops.cli", "metrics", "--port", "0", "--redis-url", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().removeprefix("ready: ").strip()
            text = httpx.get(address, timeout=DEADLINE_S).text
            assert re.search(r"^penstock_snapshot_ok 0.0$", text, re.MULTILINE)
        finally:
            process.terminate()
        assert process.wait(DEADLINE_S) == 0


def test_the_page_has_the_table() -> None:
    assert "\n".join(table()) in PAGE.read_text(), "print it by python -m penstock.ops.lab.metrics_table"
