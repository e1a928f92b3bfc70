"""What was counted, minute by minute: added by whoever counts, sampled by whoever reaps."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
import textwrap

import pytest

from penstock.shared.broker import Broker
from penstock.shared.broker.series import SeriesPoint, SeriesStore, TenantPoint, bucket_amounts
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import ValidationError
from penstock.shared.stats import Histogram

from .conftest import CAUSE, enqueue, final, take


@pytest.fixture
def store(commands: CommandConnection, broker: Broker) -> SeriesStore:
    return SeriesStore(commands, broker.keys)


def total(points: list[SeriesPoint], field: str) -> int:
    """The sum over steps: a minute may have turned in between."""
    return sum(getattr(point, field) for point in points)


async def test_each_step_has_the_same_sums(store: SeriesStore) -> None:
    for number in range(1, 4):
        point = TenantPoint(tokens_in=2, tokens_out=5, requests=1)
        assert await store.add("w", number, {"tokens_in": 2, "tokens_out": 5, "ended:finished": 1}, {"t": point})
    for step_s in (60, 600, 3600):
        points = await store.read(hours=2, step_s=step_s)
        assert len(points) == 7200 // step_s
        assert [after.at - before.at for before, after in itertools.pairwise(points)] == [step_s] * (len(points) - 1)
        assert (total(points, "tokens_in"), total(points, "tokens_out")) == (6, 15)
        assert sum(point.ended.get("finished", 0) for point in points) == 3
        of_tenant = [point.tenants["t"] for point in points if "t" in point.tenants]
        assert (sum(one.requests for one in of_tenant), sum(one.tokens_out for one in of_tenant)) == (3, 15)


async def test_a_call_that_is_sent_again_adds_nothing(store: SeriesStore) -> None:
    assert await store.add("w", 1, {"tokens_out": 5})
    assert not await store.add("w", 1, {"tokens_out": 5})
    assert await store.add("other", 1, {"tokens_out": 5})
    assert total(await store.read(), "tokens_out") == 10


async def test_histograms_add_up_by_differences(store: SeriesStore) -> None:
    before, now = Histogram.empty((0.1, 1.0)), Histogram.empty((0.1, 1.0))
    before.observe(0.05)
    now.observe(0.05)
    now.observe(0.5, 3)
    now.observe(7.0)
    await store.add("w", 1, bucket_amounts("latency_s", now, before))
    await store.add("v", 1, bucket_amounts("latency_s", before, None))
    (point,) = [one for one in await store.read(hours=2, step_s=3600) if one.histograms]
    found = point.histograms["latency_s"]
    assert (found.bounds, found.counts, found.sum) == ((0.1, 1.0), [1, 3, 1], pytest.approx(8.55))
    assert (point.quantile("latency_s", 0.5), point.quantile("latency_s", 0.99)) == (1.0, float("inf"))
    assert point.quantile("queue_time_s", 0.5) is None


async def test_series_distinguish_a_hundred_tenants_and_merge_the_rest(store: SeriesStore) -> None:
    for number in range(1, 4):
        tenants = {f"t{number}-{i}": TenantPoint(tokens_out=1) for i in range(50)}
        await store.add("w", number, {}, tenants)
    (point,) = [one for one in await store.read(hours=2, step_s=3600) if one.tenants]
    assert len(point.tenants) == 101
    assert point.tenants[""].tokens_out == 50
    assert sum(one.tokens_out for one in point.tenants.values()) == 150


async def test_a_reaper_samples_the_gauges(broker: Broker, store: SeriesStore) -> None:
    await enqueue(broker, "run", "wait", "gone", num_prompt_tokens=3, max_tokens=4)
    await take(broker, "e0", 1)
    await broker.cancel("gone")
    for _ in range(5):
        await broker.reap(CAUSE, max_deliveries=3)
    (point,) = [one for one in await store.read() if one.gauges]
    assert point.gauges.pop("oldest_ms") >= 0
    assert point.gauges == {"waiting": 1.0, "waiting_tokens": 7.0, "running": 1.0, "engines": 1.0}
    assert point.ended == {"cancelled": 1}


async def test_a_reaper_does_not_count_ends_written_by_engines(broker: Broker, store: SeriesStore) -> None:
    await enqueue(broker, "a")
    await take(broker, "e0", 1)
    await broker.finish([final("a", 1, 0, 9)])
    await broker.reap(CAUSE, max_deliveries=3)
    assert all(point.ended == {} for point in await store.read())


_COUNTS = """
    import asyncio, sys
    from penstock.shared.broker.series import SeriesStore
    from penstock.shared.connection import CommandConnection
    from penstock.shared.keys import Keys
    from penstock.shared.messages.deltas import Delta
    from penstock.shared.messages.outcome import FinishReason, Usage
    from penstock.worker.serving.reporting.engine_meter import EngineMeter
    from penstock.worker.serving.reporting.engine_meter import SeriesWriter

    async def main():
        connection, meter = CommandConnection(sys.argv[1]), EngineMeter()
        writer = SeriesWriter(SeriesStore(connection, Keys(sys.argv[2]).model("m")), meter)
        while True:
            for _ in range(10):
                meter.count_tenant("t", 3, None)
            await writer.add()
            print(flush=True)

    asyncio.run(main())
"""


def count_until_killed(*arguments: str) -> int:
    """Let a process count until it has said so a few times; returns how many additions it has told of."""
    command = [sys.executable, "-c", textwrap.dedent(_COUNTS), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(20):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        return 20 + len(process.stdout.readlines())


async def test_a_killed_process_loses_one_interval_at_most(namespace: str, store: SeriesStore, broker_on: str) -> None:
    num_told = await asyncio.to_thread(count_until_killed, broker_on, namespace)
    # What it had added without saying so yet is there as well; what it was counting is not.
    assert total(await store.read(), "tokens_out") in (30 * num_told, 30 * (num_told + 1))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"hours": 0}, "hours must be a number above 0"),
        ({"hours": 3000}, "at most 2160"),
        ({"hours": 25, "step_s": 60}, r"step_s must be one of \[600, 3600\]"),
    ],
)
async def test_ranges_and_steps_that_are_not_stored_are_refused(store: SeriesStore, wanted, message) -> None:
    with pytest.raises(ValidationError, match=message):
        await store.read(**wanted)
