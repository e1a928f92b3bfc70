"""``worker start`` from READY to its end, whichever way it ends: nothing is left, and everything is said."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import redis

from penstock.producer import Client, SamplingParams
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.audit import Audit
from penstock.shared.deployment.orders import read_drains
from penstock.shared.keys import Keys
from penstock.shared.redis_access.embedded import ServerFolder, read_status
from penstock.worker import cli as worker_cli

from ...conftest import DEMO_MODEL
from ...gate import Gate
from ...processes import is_gone
from ..gated_weights import GatedModel
from .conftest import DEADLINE_S, StartedWorker, StartWorker, run_worker, wait_until

pytestmark = pytest.mark.slow


async def submit_and_await_first_token(url: str, namespace: str, gate: Gate) -> str:
    """Enqueue a detached generation, and return its request_id when it runs; it does not come to its end."""
    gate.hold_at(1)
    async with Client.connect(url, namespace=namespace) as client:
        handle = await client.submit("four plus two is", SamplingParams(max_tokens=9, ignore_eos=True))
        async for _ in handle.stream():
            return handle.request_id
    raise AssertionError("no token came")


def state_of(url: str, namespace: str, request_id: str) -> object:
    with redis.Redis.from_url(url) as client:
        return client.hget(Keys(namespace).model("demo").request(request_id), "state")


def test_serves_is_listed_and_drains(
    start_worker: StartWorker, namespace: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Uses the embedded Redis, which starts and stops with the worker."""
    monkeypatch.delenv("PENSTOCK_REDIS_URL")
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path / "data"))
    options = ("--metrics-port", "0", "--log-stats-interval", "1", "--speculative", "ngram:5")
    worker = start_worker("--device", "cpu", "--engines", "2", *options)
    worker.await_ready()
    assert worker.out == "ready: model demo on 2 engines, cpu\n"
    configuration = worker.await_event("configuration")
    assert (configuration["speculative"], configuration["engines"], configuration["seed"]) == ("ngram:5", 2, 0)
    url = str(worker.await_event("metrics_served")["url"])
    assert httpx.get(url.replace("/metrics", "/readyz"), timeout=DEADLINE_S).status_code == 200

    where = ("--namespace", namespace)
    beats = json.loads(run_worker("list", "--json", *where).stdout)
    worker_id = beats[0]["worker_id"]
    assert re.fullmatch(rf"{re.escape(socket.gethostname())}-{worker.process.pid}-[0-9a-f]{{4}}", worker_id)
    assert [beat["engine_id"] for beat in beats] == [f"{worker_id}-0", f"{worker_id}-1"]
    assert [beat["engine_name"] for beat in beats] == [f"{socket.gethostname()}-0", f"{socket.gethostname()}-1"]
    assert {beat["state"] for beat in beats} == {"ready"}
    assert {beat["setup"]["speculative"] for beat in beats} == {"ngram:5"}
    num_free_rows = beats[0]["setup"]["num_free_rows"]
    assert re.search(
        rf"GUESSES +GROUP +WEIGHTS *\n.* ngram:5/{num_free_rows} +- +[0-9a-f]{{12}}\n",
        run_worker("list", *where).stdout,
    )
    assert [beat["worker_pid"] for beat in beats] == [process.pid for process in worker.worker_processes()]

    command = [sys.executable, "-m", "penstock.ops.cli", "generate", "four plus two is", "--temperature", "0"]
    answer = subprocess.run([*command, *where], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert answer.stdout.strip()
    # By what the worker processes say, once a second.
    counted = re.compile(r'^penstock_generation_tokens_total\{engine="(.+)",model_name="demo"\} [1-9]', re.MULTILINE)
    wait_until(lambda: counted.search(httpx.get(url, timeout=DEADLINE_S).text), "the tokens are not told")
    assert worker.await_event("engine_stats")["model"] == "demo"

    drained = run_worker("drain", worker_id, *where)
    assert (drained.returncode, drained.stdout) == (0, f"left: {worker_id}\n"), drained.stderr
    assert worker.await_end() == 0
    assert read_status(ServerFolder.prepare()) is None


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_finishes_running_requests(
    start_worker: StartWorker, redis_url: str, namespace: str, signal_number: int
) -> None:
    worker = start_worker("--device", "cpu")
    await asyncio.to_thread(worker.await_ready)
    async with Client.connect(redis_url, namespace=namespace) as client:
        num_tokens = 0
        params = SamplingParams(max_tokens=300, ignore_eos=True, temperature=0.0)
        async for delta in client.stream("four plus two is", params):
            if num_tokens == 0:
                worker.process.send_signal(signal_number)
            num_tokens += len(delta.token_ids)
    assert num_tokens == 300
    assert await asyncio.to_thread(worker.await_end) == 0
    assert worker.await_event("leaving")["step"] == "drain"
    assert "Traceback" not in worker.err


async def test_second_signal_requeues_requests_immediately(
    start_worker: StartWorker, gate: Gate, redis_url: str, namespace: str
) -> None:
    worker = start_worker("--device", "cpu")
    await asyncio.to_thread(worker.await_ready)
    request_id = await submit_and_await_first_token(redis_url, namespace, gate)
    worker.process.terminate()
    await asyncio.to_thread(worker.await_event, "leaving")
    worker.process.terminate()
    assert await asyncio.to_thread(worker.await_end) == 0
    assert leaving_steps(worker) == ["drain", "hand_back"]
    assert state_of(redis_url, namespace, request_id) == b"queued"


async def test_third_signal_kills(start_worker: StartWorker, gate: Gate, redis_url: str, namespace: str) -> None:
    worker = start_worker("--device", "cpu")
    await asyncio.to_thread(worker.await_ready)
    request_id = await submit_and_await_first_token(redis_url, namespace, gate)
    # Stopped, the worker process can neither drain nor hand back; only a kill is left.
    for process in worker.worker_processes():
        process.suspend()
    for number in (1, 2):  # one at a time: signals that wait together are delivered as one
        worker.process.terminate()
        await asyncio.to_thread(wait_until, lambda n=number: len(leaving_steps(worker)) == n, "signal not seen")
    worker.process.terminate()
    assert await asyncio.to_thread(worker.await_end) == 1
    assert leaving_steps(worker) == ["drain", "hand_back", "kill"]
    # What could not be handed back was taken back.
    assert state_of(redis_url, namespace, request_id) == b"queued"


async def test_stop_requeues_running_requests(
    start_worker: StartWorker, gate: Gate, redis_url: str, namespace: str
) -> None:
    worker = start_worker("--device", "cpu")
    await asyncio.to_thread(worker.await_ready)
    request_id = await submit_and_await_first_token(redis_url, namespace, gate)
    assert await asyncio.to_thread(worker_cli.main, ["stop", "--namespace", namespace]) == 0
    assert await asyncio.to_thread(worker.await_end) == 0
    assert state_of(redis_url, namespace, request_id) == b"queued"


async def test_drain_with_a_short_timeout_requeues_requests(
    start_worker: StartWorker, gate: Gate, redis_url: str, namespace: str
) -> None:
    worker = start_worker("--device", "cpu")
    await asyncio.to_thread(worker.await_ready)
    request_id = await submit_and_await_first_token(redis_url, namespace, gate)
    command = ["drain", "--timeout", "0.1", "--namespace", namespace]
    assert await asyncio.to_thread(worker_cli.main, command) == 0
    assert await asyncio.to_thread(worker.await_end) == 0
    assert state_of(redis_url, namespace, request_id) == b"queued"


async def test_killed_processes_are_replaced_and_generations_resume(
    start_worker: StartWorker, gate: Gate, redis_url: str, namespace: str
) -> None:
    """Kill the worker process, then the engine core (kill -9). A single engine must recover on its own."""
    worker = start_worker("--device", "cpu")
    await asyncio.to_thread(worker.await_ready)
    async with Client.connect(redis_url, namespace=namespace) as client:
        params = SamplingParams(max_tokens=1500, ignore_eos=True, temperature=0.0)
        indexes: list[int] = []
        num_killed = 0
        gate.hold_at(250)
        async with asyncio.timeout(DEADLINE_S):
            async for delta in client.stream("four plus two is", params):
                indexes += range(delta.index, delta.next_index)
                if num_killed < 2 and len(indexes) > 200 * (num_killed + 1):
                    await asyncio.to_thread(await_restarts, worker, num_killed)
                    worker.note_processes()
                    (process,) = worker.worker_processes()
                    core = worker.newest_core()
                    (process if num_killed == 0 else core).kill()
                    num_killed += 1
                    await asyncio.to_thread(wait_until, lambda core=core: is_gone(core), "the core outlived it")
                    if num_killed == 1:
                        gate.hold_at(450)
                    else:
                        gate.open()
    assert indexes == list(range(1500))
    await asyncio.to_thread(await_restarts, worker, 2)
    causes = [str(event["cause"]) for event in events(worker, "engine_lost")]
    assert causes[0] == "the worker process was killed by SIGKILL"
    assert "engine core" in causes[1]
    assert [event["num_restarts"] for event in events(worker, "engine_restarted")] == [1, 2]
    worker.process.terminate()
    assert await asyncio.to_thread(worker.await_end) == 0


def test_the_other_engine_stays(start_worker: StartWorker) -> None:
    worker = start_worker("--device", "cpu", "--engines", "2")
    worker.await_ready()
    first, second = worker.worker_processes()
    first.kill()
    assert str(worker.await_event("engine_restarted")["engine_id"]).endswith("-0")
    worker.note_processes()
    assert second in worker.worker_processes()
    worker.process.terminate()
    assert worker.await_end() == 0


def test_a_stopped_worker_process_is_replaced(start_worker: StartWorker) -> None:
    worker = start_worker("--device", "cpu", "--stall-timeout", "5")
    worker.await_ready()
    (process,) = worker.worker_processes()
    process.suspend()
    lost = worker.await_event("engine_lost")
    assert str(lost["cause"]).endswith("it was stopped")
    assert lost["is_external"] is True
    worker.await_event("engine_restarted")
    assert is_gone(process)
    worker.process.terminate()
    assert worker.await_end() == 0


def test_a_suspended_supervisor_declares_no_engine_dead(start_worker: StartWorker) -> None:
    worker = start_worker("--device", "cpu", "--stall-timeout", "3")
    worker.await_ready()
    supervisor = psutil.Process(worker.process.pid)
    supervisor.suspend()
    time.sleep(5.0)  # no waiting: the time that it stands still
    supervisor.resume()
    wait_until(lambda: any(float(str(e["gap_s"])) >= 4.5 for e in events(worker, "supervisor_paused")), "no pause")
    time.sleep(1.0)  # no waiting: to blame somebody for the pause would take it no time
    assert events(worker, "engine_lost") == []
    worker.process.terminate()
    assert worker.await_end() == 0


def test_death_of_the_supervisor_ends_its_engines(start_worker: StartWorker) -> None:
    worker = start_worker("--device", "cpu")
    worker.await_ready()
    worker.process.kill()
    wait_until(worker.all_gone, f"left behind: {worker.left()}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_starting(start_worker: StartWorker, number: int, tmp_path: Path) -> None:
    model = GatedModel(tmp_path / "model")
    model.shut()
    worker = start_worker("--device", "cpu", model=model.folder)
    worker.await_event("worker_started")
    worker.process.send_signal(number)
    assert worker.await_end() == 0
    assert worker.out == ""
    assert "Traceback" not in worker.err


def test_model_that_cannot_be_loaded(start_worker: StartWorker, tmp_path: Path) -> None:
    broken = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (broken / "config.json").write_text('{"model_type": "no_such_model"}')
    worker = start_worker("--device", "cpu", "--engines", "2", model=broken)
    assert worker.await_end() == 1
    # Off a terminal the log is JSON; the cause is told in words, and nothing of how the rest was taken down.
    *before, line = worker.err.splitlines()
    assert line.startswith("error: ")
    assert "no_such_model" in line
    assert len(before) == len(worker.events), worker.err
    starting = {"configuration", "core_started", "worker_started", "native_kernels"}
    # The log of a busy machine has these as well.
    starting |= {"redis_risk", "supervisor_paused", "worker_process_paused"}
    assert {event["event"] for event in worker.events} <= starting
    assert worker.out == ""


def test_a_start_that_fails_late_ends_with_the_cause_in_words(start_worker: StartWorker) -> None:
    worker = start_worker("--device", "cpu", "--kv-cache-memory", "1KiB")
    assert worker.await_end() == 1
    *before, last = worker.err.splitlines()
    assert last.startswith("error: ")
    assert "cache" in last
    assert {"leaving", "supervisor_gone"}.isdisjoint(e["event"] for e in worker.events)
    assert all(line.startswith("{") for line in before), worker.err


def assert_refused(worker: StartedWorker, status: int, *parts: str) -> None:
    assert worker.await_end() == status
    *before, message = worker.err.splitlines()
    assert [event["event"] for event in worker.events] in ([], ["configuration"])
    assert len(before) == len(worker.events)
    assert message.startswith("error: ")
    for part in parts:
        assert part in message


def test_gpus_of_a_machine_without(start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert_refused(start_worker("--gpus", "0,1"), 2, "--gpus 0,1: this machine has no NVIDIA GPU; use --device cpu")


def test_redis_that_is_not_there(start_worker: StartWorker) -> None:
    worker = start_worker("--device", "cpu", "--redis-url", "redis://:secret@localhost:1")
    assert_refused(worker, 1, "redis://:***@localhost:1", "Connection refused")


def test_redis_that_evicts(start_worker: StartWorker, redis_url: str, request: pytest.FixtureRequest) -> None:
    with redis.Redis.from_url(redis_url) as client:
        request.addfinalizer(lambda: redis.Redis.from_url(redis_url).config_set("maxmemory", "0"))
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", "1gb")
    assert_refused(start_worker("--device", "cpu"), 1, "maxmemory-policy is allkeys-lru")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--device", "cpu", "--kv-cache-memory", "lots"), "--kv-cache-memory must be a size"),
        (("--device", "cpu", "--max-deliveries", "several"), "--max-deliveries"),
        (("--device", "cpu", "--engines", "0"), "--engines must be at least 1"),
        (("--device", "cpu", "--engines", "1000000"), "--engines must be at most 1,024, got 1000000"),
        (("--device", "tpu"), "--device must be one of cpu, cuda, got 'tpu'"),
    ],
)
def test_wrong_arguments(start_worker: StartWorker, arguments: tuple[str, ...], part: str) -> None:
    assert_refused(start_worker(*arguments), 2, part)


def test_options_from_a_file_and_the_environment(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(
        'device = "cuda"\nengines = 3\nenforce_eager = true\nkv_cache_dtype = "fp8"\nlog_requests = false\n'
    )
    monkeypatch.setenv("PENSTOCK_ENGINES", "2")
    worker = start_worker("--config", str(file), "--device", "cpu")
    worker.await_ready()
    assert worker.out == "ready: model demo on 2 engines, cpu, KV cache in fp8_e4m3\n"
    worker.process.terminate()
    assert worker.await_end() == 0


def test_a_wrong_key_of_a_file(start_worker: StartWorker, tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("kv_cache_memroy = 1\n")
    refused = start_worker("--config", str(file))
    assert_refused(refused, 2, f"unknown key kv_cache_memroy in {file}; did you mean kv_cache_memory?")


def test_wrong_engine_configuration(start_worker: StartWorker) -> None:
    arguments = ("--device", "cpu", "--max-num-seqs", "64", "--max-num-batched-tokens", "8")
    assert_refused(start_worker(*arguments), 1, "max_num_batched_tokens (8) must be at least max_num_seqs")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--stall-timeout", "0"), "--stall-timeout must be at least 0.1, got 0.0"),
        (("--lease-ttl", "nan"), "--lease-ttl must be at least 0.1, got nan"),
        (("--drain-timeout", "-1"), "--drain-timeout must be at least 0, got -1.0"),
        (("--max-deliveries", "0"), "--max-deliveries must be at least 1, got 0"),
        (("--threads", "-1"), "--threads must be at least 0, got -1; 0 chooses"),
        (("--max-model-len", "-1"), "--max-model-len must be at least 2, got -1"),
    ],
)
def test_wrong_process_configuration(start_worker: StartWorker, arguments: tuple[str, ...], part: str) -> None:
    assert_refused(start_worker("--device", "cpu", *arguments), 2, part)


def events(worker: StartedWorker, name: str) -> list[dict[str, object]]:
    return [event for event in worker.events if event["event"] == name]


def await_restarts(worker: StartedWorker, number: int) -> None:
    wait_until(lambda: len(events(worker, "engine_restarted")) >= number, f"no restart number {number}")


def leaving_steps(worker: StartedWorker) -> list[object]:
    """The steps of leaving that the supervisor has logged so far."""
    return [event["step"] for event in events(worker, "leaving")]


def test_a_worker_serves_with_more_engines_and_fewer(
    start_worker: StartWorker, gate: Gate, redis_url: str, namespace: str
) -> None:
    """Requests on a removed engine finish there while the other engines serve."""
    worker = start_worker("--device", "cpu", "--engines", "1")
    worker.await_ready()
    where = ("--redis-url", redis_url, "--namespace", namespace)
    (beat,) = json.loads(run_worker("list", "--json", *where).stdout)
    told = run_worker("scale", beat["worker_id"], "2", *where)
    assert told.stdout == (
        f"{beat['worker_id']} serves with 2 engines until it exits; --engines sets the number at its start\n"
    )
    beats = json.loads(run_worker("list", "--json", *where).stdout)
    assert [one["engine_id"].removeprefix(beat["worker_id"]) for one in beats] == ["-0", "-1"]
    assert beats[0]["core_pid"] == beat["core_pid"]
    assert asyncio.run(_answers_while_one_engine_drains(redis_url, namespace, beat["worker_id"], gate)) == {9}
    assert asyncio.run(_audited_scales(redis_url, namespace)) == ["1 → 2", "2 → 1"]
    assert len(json.loads(run_worker("list", "--json", *where).stdout)) == 1
    worker.note_processes()
    worker.process.terminate()
    assert worker.await_end() == 0


async def _audited_scales(url: str, namespace: str) -> list[str]:
    """Changes of the number of engines in the audit log, the oldest first."""
    connection = CommandConnection(url)
    try:
        return [entry.details["engines"] for entry in (await Audit(connection, Keys(namespace)).read())[::-1]]
    finally:
        await connection.close()


async def _busy_engines(client: Client) -> list[str]:
    return [engine.engine_id for engine in await client.engines() if engine.num_running_reqs]


async def _answers_while_one_engine_drains(url: str, namespace: str, worker_id: str, gate: Gate) -> set[int]:
    """Numbers of tokens of requests that ran on both engines when one was told to go."""
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    gate.hold_at(8)
    async with Client.connect(url, namespace=namespace) as client:
        handles = []
        async with asyncio.timeout(DEADLINE_S):
            while len(await _busy_engines(client)) < 2:
                handles.append(await client.submit("four plus two is", params))
                async for _ in handles[-1].stream():
                    break
        scaling = asyncio.create_task(client.scale_worker(worker_id, 1))
        async with asyncio.timeout(DEADLINE_S):
            while not (drains := read_drains(engines := await client.engines(), time.time())):
                await asyncio.sleep(0.02)
        assert not scaling.done()
        assert re.match(rf"{worker_id} is draining: \d+ requests? (is|are) still running", str(drains[0]))
        assert [engine.drains_until > time.time() - DEADLINE_S for engine in engines].count(True) == 1
        gate.open()
        results = [await handle.result() for handle in handles]
        await scaling
    return {len(result.outputs[0].token_ids) for result in results}
