"""Figures of requests and engines, as callers see them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, Delta, RequestStats, SamplingParams
from penstock.producer.control.deployment import read_deployment
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys
from penstock.shared.stats import EngineStats

from ..gate import Gate
from ..processes import DEADLINE_S

pytestmark = pytest.mark.xdist_group("deployment")

COUNT = "count from four to nine:"


async def engine_stats(client: Client) -> EngineStats:
    (engine,) = await client.engines("demo")
    assert engine.stats is not None
    return engine.stats


async def told(client: Client, is_enough: Callable[[EngineStats], bool]) -> EngineStats:
    """Return the engine's figures once a heartbeat has them. Requests before a test may be counted during it, too."""
    async with asyncio.timeout(DEADLINE_S):
        while not is_enough(stats := await engine_stats(client)):
            await asyncio.sleep(0.05)
    return stats


async def test_the_stats_of_a_request_fit_its_callers_measurement(client: Client) -> None:
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    started, first_at, deltas = time.monotonic(), 0.0, list[Delta]()
    async for delta in client.stream(COUNT, params):
        first_at = first_at or time.monotonic()
        deltas.append(delta)
    elapsed = time.monotonic() - started
    early, whole = deltas[0].stats, deltas[-1].stats
    assert early is not None
    assert whole is not None
    assert [delta.stats for delta in deltas[1:-1]] == [None] * (len(deltas) - 2)
    # Redis's clock, at which a request arrives, and ours are read a moment apart, in whole milliseconds.
    assert 0 < early.time_to_first_token_s <= first_at - started + 0.002
    assert whole.time_to_first_token_s == early.time_to_first_token_s
    assert whole.time_to_first_token_s == pytest.approx(whole.queue_time_s + whole.prefill_time_s)
    assert whole.time_to_first_token_s + whole.decode_time_s <= whole.latency_s <= elapsed + 0.002
    assert whole.inter_token_latency_s == pytest.approx(whole.decode_time_s / 49)
    assert (whole.num_preemptions, whole.num_deliveries) == (0, 1)


async def test_every_answer_and_a_detached_result_carry_theirs(client: Client) -> None:
    output = await client.generate(COUNT, SamplingParams(temperature=1, max_tokens=8, n=2))
    handle = await client.submit(COUNT, SamplingParams(temperature=0, max_tokens=8))
    for answer in [*output.outputs, *(await handle.result()).outputs]:
        assert isinstance(answer.stats, RequestStats)
        assert 0 < answer.stats.time_to_first_token_s <= answer.stats.latency_s


async def test_the_engine_sums_the_times_of_its_requests(client: Client) -> None:
    for _ in range(2):
        await client.generate([7, 8, 9] * 20, SamplingParams(temperature=0, max_tokens=1))
    before = await told(client, lambda now: sum(now.num_finished.values()) > 0)
    params = [SamplingParams(temperature=1, max_tokens=n + 1, ignore_eos=True) for n in range(9)]
    outputs = await asyncio.gather(*(client.generate(COUNT, one) for one in params))
    after = await told(
        client,
        lambda now: (
            now.num_finished["length"] - before.num_finished["length"] >= len(outputs)
            and now.num_output_tokens - before.num_output_tokens >= sum(range(1, 10))
            and now.inter_token_latency_s.count - before.inter_token_latency_s.count >= sum(range(9))
            and now.time_to_first_token_s.count - before.time_to_first_token_s.count >= len(outputs)
            and now.latency_s.count - before.latency_s.count >= len(outputs)
        ),
    )
    assert after.num_steps == after.step_time_s.count > before.num_steps
    assert after.num_decode_tokens + after.num_prefill_tokens >= after.num_output_tokens
    assert 0 < after.prefix_cache_hits <= after.prefix_cache_queries
    assert after.execute_time_s > before.execute_time_s


async def test_tokens_count_while_an_answer_runs(client: Client, gate: Gate) -> None:
    before = await engine_stats(client)
    gate.hold_at(5)
    running = asyncio.create_task(client.generate(COUNT, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)))
    await told(
        client,
        lambda now: (
            now.num_output_tokens >= before.num_output_tokens + 5 and now.num_prompt_tokens > before.num_prompt_tokens
        ),
    )
    assert not running.done()
    gate.open()
    usage = (await running).usage
    assert usage is not None
    await told(
        client,
        lambda now: (
            now.num_output_tokens >= before.num_output_tokens + 9
            and now.num_prompt_tokens >= before.num_prompt_tokens + usage.num_prompt_tokens
        ),
    )


async def test_the_engine_writes_the_history_and_its_supervisor_marks_it_alive(
    client: Client, deployment: LocalStack
) -> None:
    before = sum(point.tokens_out for point in await client.queue_history(hours=24))
    await client.generate(COUNT, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), request_id="counted")
    points = await client.queue_history(hours=24)
    async with asyncio.timeout(DEADLINE_S):
        while sum(point.tokens_out for point in points) < before + 20:
            await asyncio.sleep(0.1)
            points = await client.queue_history(hours=24)
    counted = [point for point in points if point.histograms]
    assert set(counted[-1].histograms) == {
        "time_to_first_token_s",
        "inter_token_latency_s",
        "queue_time_s",
        "latency_s",
    }
    assert sum(point.ended.get("finished", 0) for point in points) >= 1
    assert sum(point.tenants["default"].tokens_out for point in points if "default" in point.tenants) >= 20
    assert [event.kind.value for event in await client.history("counted")] == ["queued", "claimed", "finished"]
    connection = CommandConnection(deployment.url)
    state = await read_deployment(connection, Keys())
    await connection.close()
    (supervisor,) = [process for process in state.processes if process.kind == "supervisor"]
    assert supervisor.options["worker"] == (await client.engines("demo"))[0].worker_id
    assert not [finding for finding in state.findings if finding.code == "no_engine"]
