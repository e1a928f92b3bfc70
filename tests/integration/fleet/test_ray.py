"""A fleet on a real Ray cluster of several nodes on this machine: it grows, shrinks, and leaves nothing behind.

``make test-ray`` runs the long ones as well: nodes that come, go and are killed under load.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from penstock.ops.lab.clusters.ray_cluster import RayCluster
from penstock.producer import Client, RequestHandle, SamplingParams
from penstock.shared.errors import ConfigurationError

from ...conftest import DEMO_MODEL
from ...gate import Gate
from ..supervisor.conftest import DEADLINE_S, StartedWorker, run_worker, wait_until
from .conftest import processes_of

pytest.importorskip("ray", reason="Ray is not installed: pip install 'penstock-llm[ray]'")
# One cluster at a time: it takes most of a gigabyte.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
LONG_VARIABLE = "PENSTOCK_TEST_RAY"
long = pytest.mark.skipif(LONG_VARIABLE not in os.environ, reason="takes a minute or more: run `make test-ray`")

PROMPT = "four plus two is"
# Ends after three tokens; what waits counts by the most that it may have.
SHORT = SamplingParams(temperature=0.0, max_tokens=400)
FIRST = SamplingParams(temperature=0.0, max_tokens=1)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
NUM_SHORT = 40
NUM_MORE_STARTS = 5

StartFleet = Callable[..., StartedWorker]


@pytest.fixture
def ray_cluster(tmp_path: Path, gate: Gate) -> Iterator[RayCluster]:
    """A head without room; engines heed the gate."""
    with started_cluster(tmp_path / "ray.log") as cluster:
        yield cluster


def started_cluster(log_path: Path) -> RayCluster:
    """Start a cluster. Ray gives up a head whose agents start for more than 15 seconds, as on a busy slow machine
    (github.com/ray-project/ray/issues/65983), so that is tried again.
    """
    for _ in range(NUM_MORE_STARTS):
        with contextlib.suppress(ConfigurationError):
            return RayCluster(log_path)
    return RayCluster(log_path)


def options(cluster: RayCluster, redis_url: str, namespace: str, engines: str) -> list[str]:
    where = ["--ray", cluster.address, "--engines", engines, "--redis-url", redis_url, "--namespace", namespace]
    small = ["--model", str(DEMO_MODEL), "--served-model-name", "demo", "--device", "cpu", "--threads", "1"]
    small += ["--kv-cache-memory", "64MiB", "--max-num-seqs", "16", "--log-requests"]
    return [*where, *small, "--wanted-wait", "0.1", "--shrink-after", "2"]


def num_serving(namespace: str, redis_url: str) -> int:
    listed = run_worker("list", "--json", "--namespace", namespace, "--redis-url", redis_url)
    return sum(beat["state"] in ("ready", "busy") for beat in json.loads(listed.stdout))


async def until(fleet: StartedWorker, condition: Callable[[], object]) -> None:
    """Wait for the condition in a thread; what the fleet said is told if it does not come."""
    try:
        await asyncio.to_thread(wait_until, condition, "it has not come")
    except AssertionError as error:
        raise AssertionError(fleet.err) from error


async def result_of(handle: RequestHandle) -> list[int]:
    async with asyncio.timeout(DEADLINE_S):
        return list((await handle.result()).outputs[0].token_ids)


async def test_it_grows_with_the_queue_shrinks_when_it_is_done_and_leaves_nothing(
    ray_cluster: RayCluster, start_fleet: StartFleet, redis_url: str, namespace: str, gate: Gate
) -> None:
    await asyncio.to_thread(ray_cluster.add, 4)
    fleet = start_fleet(*options(ray_cluster, redis_url, namespace, "1:2"))
    await until(fleet, lambda: fleet.out or fleet.process.poll() is not None)
    assert fleet.out.startswith("ready: model demo on 1 to 2 engines, Ray at "), fleet.err
    async with Client.connect(redis_url, namespace=namespace, wait_for_model=True) as client:
        # One that is short ends, so that a rate is known; many that may be long are held, so that the queue stays. A
        # machine that makes a token in a millisecond needs seconds for those.
        assert len((await client.generate(PROMPT, FIRST, model="demo")).outputs[0].token_ids) == 1
        gate.hold_at(1)
        handles = [await client.submit(PROMPT, SHORT, model="demo") for _ in range(NUM_SHORT)]
        await until(fleet, lambda: num_serving(namespace, redis_url) == 2)
        grown = await asyncio.to_thread(fleet.await_event, "fleet_target")
        assert (grown["before"], grown["engines"]) == (1, 2)
        listed = json.loads(run_worker("list", "--json", "--namespace", namespace, "--redis-url", redis_url).stdout)
        assert {beat["engine_name"] for beat in listed} == {"demo-ray-0-0", "demo-ray-1-0"}
        gate.hold_at(5)
        answers = [await result_of(handle) for handle in handles]
        assert len(answers) == NUM_SHORT
        assert {tuple(answer) for answer in answers} == {tuple(answers[0])}
        # Eight are held in the middle while one of the two leaves: those that it has end there, or go on elsewhere.
        held = [await client.submit(PROMPT, LONG, model="demo") for _ in range(8)]
        await asyncio.to_thread(fleet.await_event, "fleet_engine_leaves")
        gate.open()
        await asyncio.to_thread(fleet.await_event, "fleet_engine_left")
        outputs = [await result_of(handle) for handle in held]
        assert {len(tokens) for tokens in outputs} == {60}
        assert {tuple(tokens) for tokens in outputs} == {tuple(outputs[0])}
    assert num_serving(namespace, redis_url) == 1
    fleet.process.terminate()
    assert await asyncio.to_thread(fleet.process.wait, DEADLINE_S) == 0, fleet.err
    assert processes_of(namespace) == []
    assert await asyncio.to_thread(ray_cluster.left) == {"actors": 0, "groups": 0}


@long
async def test_joining_leaving_and_killed_nodes_lose_no_request_under_load(
    ray_cluster: RayCluster, start_fleet: StartFleet, redis_url: str, namespace: str
) -> None:
    """Each node has capacity for one engine. Every request ends with the same tokens."""
    first = await asyncio.to_thread(ray_cluster.add, 1)
    fleet = start_fleet(*options(ray_cluster, redis_url, namespace, "2:2"))
    # The second engine waits until there is a node for it.
    await asyncio.to_thread(fleet.await_event, "fleet_capacity_missing")
    second = await asyncio.to_thread(ray_cluster.add, 1)
    await asyncio.to_thread(fleet.await_ready)
    async with Client.connect(redis_url, namespace=namespace, wait_for_model=True) as client:
        expected = list((await client.generate(PROMPT, LONG, model="demo")).outputs[0].token_ids)
        ended: list[list[int]] = []
        stopping = asyncio.Event()

        async def ask_on() -> None:
            while not stopping.is_set():
                handle = await client.submit(PROMPT, LONG, model="demo")
                ended.append(await result_of(handle))

        asking = [asyncio.create_task(ask_on()) for _ in range(8)]
        for leaving, is_killed in ((first, True), (second, False)):
            before = len(ended)
            await asyncio.to_thread(ray_cluster.remove, leaving, kill=is_killed)
            await until(fleet, lambda n=before: len(ended) > n + 20)
            await asyncio.to_thread(ray_cluster.add, 1)
            await until(fleet, lambda: num_serving(namespace, redis_url) == 2)
        kill_an_agent(namespace)
        before = len(ended)
        await until(fleet, lambda: len(ended) > before + 20)
        stopping.set()
        await asyncio.gather(*asking)
    assert {tuple(tokens) for tokens in ended} == {tuple(expected)}
    fleet.process.terminate()
    assert await asyncio.to_thread(fleet.process.wait, DEADLINE_S) == 0, fleet.err
    assert processes_of(namespace) == []
    assert await asyncio.to_thread(ray_cluster.left) == {"actors": 0, "groups": 0}


@long
async def test_an_engine_over_two_hosts_moves_when_either_is_killed(
    ray_cluster: RayCluster, start_fleet: StartFleet, redis_url: str, namespace: str, gate: Gate
) -> None:
    """Its ranks never share a host. A generation resumes after its last token, with the same tokens."""
    first = await asyncio.to_thread(ray_cluster.add, 2)
    layout = ("--tensor-parallel-size", "2", "--nnodes", "2", "--deterministic")
    fleet = start_fleet(*options(ray_cluster, redis_url, namespace, "1:1"), *layout)
    await asyncio.to_thread(fleet.await_event, "fleet_capacity_missing")
    second = await asyncio.to_thread(ray_cluster.add, 2)
    await asyncio.to_thread(fleet.await_ready)
    async with Client.connect(redis_url, namespace=namespace, wait_for_model=True) as client:
        expected = list((await client.generate(PROMPT, LONG, model="demo")).outputs[0].token_ids)
        for leaving in (first, second):
            gate.hold_at(5)
            handle = await client.submit(PROMPT, LONG, model="demo")
            async with asyncio.timeout(DEADLINE_S), contextlib.aclosing(handle.stream()) as stream:
                await anext(stream)
            await asyncio.to_thread(ray_cluster.remove, leaving, kill=True)
            await asyncio.to_thread(ray_cluster.add, 2)
            gate.open()
            assert await result_of(handle) == expected
    fleet.process.terminate()
    assert await asyncio.to_thread(fleet.process.wait, DEADLINE_S) == 0, fleet.err
    assert processes_of(namespace) == []
    assert await asyncio.to_thread(ray_cluster.left) == {"actors": 0, "groups": 0}


@long
async def test_a_driver_that_is_killed_leaves_nothing_and_its_requests_wait(
    ray_cluster: RayCluster, start_fleet: StartFleet, redis_url: str, namespace: str, gate: Gate
) -> None:
    await asyncio.to_thread(ray_cluster.add, 4)
    gate.hold_at(5)
    fleet = start_fleet(*options(ray_cluster, redis_url, namespace, "0:2"))
    await asyncio.to_thread(fleet.await_ready)
    async with Client.connect(redis_url, namespace=namespace, wait_for_model=True) as client:
        # The first request wakes it.
        handle = await client.submit(PROMPT, LONG, model="demo")
        stream = handle.stream()
        async with asyncio.timeout(DEADLINE_S):
            await anext(stream)
        fleet.process.send_signal(signal.SIGKILL)
        fleet.process.wait()
        await until(fleet, lambda: not processes_of(namespace))
        await until(fleet, lambda: not any(ray_cluster.left().values()))
        gate.open()
        again = start_fleet(*options(ray_cluster, redis_url, namespace, "1:1"))
        assert len(await result_of(handle)) == 60
        await stream.aclose()
        again.process.terminate()
        assert await asyncio.to_thread(again.process.wait, DEADLINE_S) == 0, again.err


@long
async def test_bundles_of_an_existing_placement_group_are_used(
    ray_cluster: RayCluster, start_fleet: StartFleet, redis_url: str, namespace: str
) -> None:
    await asyncio.to_thread(ray_cluster.add, 4)
    await asyncio.to_thread(ray_cluster.make_group, "mine", 2)
    messages = {
        ("1:2", "other"): "--ray-placement-group other: Ray's namespace 'penstock' has no such group",
        ("3:4", "mine"): "--ray-placement-group mine has room for 2 engines",
    }
    for (engines, group), message in messages.items():
        words = [*options(ray_cluster, redis_url, namespace, engines), "--ray-placement-group", group]
        started = start_fleet(*words)
        assert await asyncio.to_thread(started.process.wait, DEADLINE_S) != 0
        assert message in started.err
    words = [*options(ray_cluster, redis_url, namespace, "2:4"), "--ray-placement-group", "mine"]
    fleet = start_fleet(*words)
    await asyncio.to_thread(fleet.await_ready)
    assert num_serving(namespace, redis_url) == 2
    # One that dies is replaced in the bundle that it had.
    kill_a_worker(namespace)
    await asyncio.to_thread(fleet.await_event, "fleet_engine_lost")
    await until(fleet, lambda: num_serving(namespace, redis_url) == 2)
    fleet.process.terminate()
    assert await asyncio.to_thread(fleet.process.wait, DEADLINE_S) == 0, fleet.err
    assert await asyncio.to_thread(ray_cluster.left) == {"actors": 0, "groups": 1}


def kill_a_worker(namespace: str) -> None:
    """kill -9 of a ``worker start`` that an agent holds."""
    next(process for process in processes_of(namespace) if "penstock.worker.cli.held" in process.cmdline()).kill()


def kill_an_agent(namespace: str) -> None:
    """kill -9 of the actor's process that holds a worker."""
    held = next(process for process in processes_of(namespace) if "penstock.worker.cli.held" in process.cmdline())
    psutil.Process(held.ppid()).kill()
