"""Engines controlled from outside while they serve: client, Redis, worker process and core, all real."""

from __future__ import annotations

import asyncio
import json
import pstats
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from penstock.ops.local.stack import LocalStack
from penstock.producer import LLM, Client, EngineCallError, SleepState
from penstock.shared import errors
from penstock.shared.broker import EngineCalls
from penstock.shared.connection import CommandConnection
from penstock.shared.control.calls import CallError, ControlCommand, ControlReply
from penstock.shared.control.engine import ProfileStarted, StartProfile, StopProfile
from penstock.shared.keys import Keys
from penstock.shared.messages.supervision import EngineState

from ..gate import Gate
from ..processes import DEADLINE_S
from ..warm_python import light_python
from .following import LONG, NUM_TOKENS, PROMPT, Following, beats, short, states

pytestmark = pytest.mark.xdist_group("deployment")

ASLEEP = ["weights", "kv_cache"]


@pytest.fixture(scope="module")
def expected(deployment: LocalStack) -> list[int]:
    """The undisturbed answer to ``LONG``."""
    with LLM(deployment.url, model="demo") as llm:
        return list(llm.generate(PROMPT, LONG, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.fixture
async def awake(client: Client) -> AsyncIterator[Client]:
    """The client; whatever the test did, the shared engine is awake afterwards."""
    yield client
    await client.wake_up()


@pytest.mark.parametrize("level", [1, 2])
async def test_the_only_engine_sleeps_in_the_middle_of_a_stream(
    deployment: LocalStack, awake: Client, gate: Gate, expected: list[int], level: int
) -> None:
    following = Following(awake, gate)
    await following.under_way()
    ((engine_id, state),) = (await awake.sleep(level)).items()
    assert state == SleepState(level, ASLEEP)
    assert await states(deployment.url) == {engine_id: EngineState.SLEEPING}
    await awake.check_health()
    stats = await awake.queue_stats()
    assert (stats.num_running, stats.num_returned) == (0, 1)
    waiting = asyncio.create_task(short(awake))
    assert await awake.sleep(level, engine_id=engine_id) == {engine_id: state}
    assert await awake.wake_up(["weights"]) == {engine_id: SleepState(level, ["kv_cache"])}
    assert await awake.is_sleeping() == {engine_id: True}
    assert await states(deployment.url) == {engine_id: EngineState.SLEEPING}
    assert following.num_tokens < NUM_TOKENS
    assert not waiting.done()
    assert await awake.wake_up(["kv_cache"]) == await awake.wake_up() == {engine_id: SleepState()}
    await following.check(expected)
    assert await waiting == expected[:20]
    assert EngineState.SLEEPING not in (await states(deployment.url)).values()


async def test_wait_finishes_running_requests_and_starts_none(awake: Client, gate: Gate, expected: list[int]) -> None:
    following = Following(awake, gate)
    await following.under_way()
    sleeping = asyncio.create_task(awake.sleep(mode="wait", drain_timeout_s=60))
    gate.open()
    await sleeping
    assert (await awake.queue_stats()).num_returned == 0
    await following.check(expected)
    assert list((await awake.is_sleeping()).values()) == [True]


async def test_requests_that_do_not_end_in_time_are_requeued(awake: Client, gate: Gate, expected: list[int]) -> None:
    following = Following(awake, gate)
    await following.under_way()
    await awake.sleep(mode="wait", drain_timeout_s=0.05)
    assert (await awake.queue_stats()).num_returned == 1
    await awake.wake_up()
    await following.check(expected)


async def test_abort_ends_running_requests_with_their_output(awake: Client, gate: Gate, expected: list[int]) -> None:
    following = Following(awake, gate)
    await following.under_way()
    await awake.sleep(mode="abort")
    async with asyncio.timeout(DEADLINE_S):
        await following.task
    assert [delta.finish_reason for delta in following.deltas if delta.finished] == ["abort"]
    token_ids = [token_id for delta in following.deltas for token_id in delta.token_ids]
    assert 0 < len(token_ids) < NUM_TOKENS
    assert token_ids == expected[: len(token_ids)]
    assert following.deltas[-1].usage is not None
    assert following.deltas[-1].usage.num_output_tokens == len(token_ids)


async def test_calls_that_touch_no_request_while_one_runs(
    deployment: LocalStack, client: Client, gate: Gate, expected: list[int]
) -> None:
    following = Following(client, gate)
    await following.under_way()
    (seconds,) = (await client.execute_dummy_batch()).values()
    assert 0 < seconds < 60
    assert list((await client.reset_prefix_cache()).values()) == [False]
    (invariants,) = (await client.check_invariants()).values()
    assert invariants.num_running_reqs == 1
    (info,) = (await client.collective_rpc("device_info")).values()
    assert [beat.core_pid for beat in (await beats(deployment.url)).values()] == [info["pid"]]
    with pytest.raises(EngineCallError, match="no RPC method 'exit' is registered; available: check_invariants, dev"):
        await client.collective_rpc("exit")
    assert not following.task.done()
    await following.check(expected)
    assert list((await client.reset_prefix_cache()).values()) == [True]


async def test_calls_at_the_same_time_are_each_answered(awake: Client, gate: Gate, expected: list[int]) -> None:
    following = Following(awake, gate)
    await following.under_way()
    calls = [awake.sleep(), awake.sleep(2), awake.wake_up(), awake.sleep(), awake.execute_dummy_batch()]
    results = await asyncio.gather(*calls, *(awake.sleep_state() for _ in range(20)), return_exceptions=True)
    for result in results:
        # A command in between may be impossible at that moment; every one gets an answer.
        causes = list(result.errors.values()) if isinstance(result, EngineCallError) else []
        assert isinstance(result, dict) or isinstance(causes[0], errors.EngineStateError)
    await awake.wake_up()
    await following.check(expected)


async def test_handling_of_repeated_late_and_undecodable_calls(deployment: LocalStack, client: Client) -> None:
    """A repeated call is run once, a late one is not begun, an undecodable one is answered."""
    (engine_id,) = await client.is_sleeping()
    commands = CommandConnection(deployment.url)
    calls = EngineCalls(commands, Keys().model("demo"))
    late_ms = await calls.now_ms() - 1

    async def reply(call_id: str, *payloads: bytes) -> ControlReply:
        for payload in payloads:
            await commands.execute("PUBLISH", calls.keys.engine_commands(engine_id), payload)
        async with asyncio.timeout(DEADLINE_S):
            while not (replies := await calls.read_replies(call_id, [engine_id])):
                await asyncio.sleep(0.01)
        return msgspec.msgpack.decode(replies[0], type=ControlReply)

    try:
        start = ControlCommand(call_id="twice", call=StartProfile(), expires_at_ms=late_ms + 60_000)
        data = msgspec.msgpack.encode(start)
        once = await reply("twice", data, data)
        assert isinstance(once.answer, ProfileStarted)
        assert await reply("twice", data) == once
        late = ControlCommand(call_id="late", call=StopProfile(), expires_at_ms=late_ms)
        assert (await reply("late", msgspec.msgpack.encode(late))).error == CallError(
            "engine_timeout", "the call expired before the engine could start it"
        )
        (path,) = (await client.stop_profile()).values()
        worker_profile = Path(path).with_suffix(".worker.prof")
        assert any("call_handler.py" in file for file, _, _ in pstats.Stats(str(worker_profile)).stats)  # type: ignore[attr-defined]
        Path(path).unlink()
        worker_profile.unlink()
        unread = (await reply("unread", msgspec.msgpack.encode(["control", 9, "unread", ["dream"], late_ms]))).error
        assert unread is not None
        assert (unread.code, "cannot read the call" in unread.message) == ("validation_error", True)
    finally:
        await commands.close()


async def test_a_profile_of_client_worker_and_core(client: Client, tmp_path: Path) -> None:
    own = tmp_path / "client.prof"
    await client.start_profile(prefix="all-", use_gzip=True, client_file=own)
    await short(client)
    (path,) = map(Path, (await client.stop_profile()).values())
    worker = path.with_name(path.name.replace(".json.gz", ".worker.prof"))
    assert path.name.startswith("all-")
    assert path.exists()
    for file, module in ((worker, "worker/serving/"), (own, "producer/requests/")):
        assert any(module in name for name, _, _ in pstats.Stats(str(file)).stats)  # type: ignore[attr-defined]
    with pytest.raises(errors.ValidationError, match="prefix must be a part of a file's name"):
        await client.start_profile(prefix="../a")


def test_the_blocking_facade(deployment: LocalStack) -> None:
    with LLM(deployment.url, model="demo") as llm:
        (engine_id,) = llm.reset_prefix_cache()
        try:
            assert llm.sleep(2, engine_id=engine_id) == {engine_id: SleepState(2, ASLEEP)}
        finally:
            assert llm.wake_up() == {engine_id: SleepState()}
        assert llm.collective_rpc("check_invariants") == {engine_id: True}


def penstock(deployment: LocalStack, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [light_python(), "-m", "penstock.ops.cli", "engine", *arguments, "--redis-url", deployment.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_the_commands(deployment: LocalStack) -> None:
    try:
        slept = penstock(deployment, "sleep", "--level", "2", "--mode", "abort")
        assert slept.stdout.splitlines()[1].endswith("  asleep (level 2: weights, kv_cache)"), slept.stderr
    finally:
        woken = penstock(deployment, "wake-up", "--json")
    (engine_id,) = json.loads(woken.stdout)
    status = penstock(deployment, "status", "--engine", engine_id)
    assert status.stdout.split() == ["ENGINE", "ANSWER", engine_id, "awake"]
    could = penstock(deployment, "reload-weights", "--check")
    assert re.search(rf"^{engine_id}  could change: (\w+) -> \1 of /", could.stdout, re.MULTILINE), could.stderr
    changed = penstock(deployment, "reload-weights", "--version", "once more", "--json", "--engine", engine_id)
    assert "once more" in json.loads(changed.stdout)[engine_id], changed.stderr
    nowhere = penstock(deployment, "reload-weights", "/nowhere")
    assert (nowhere.returncode, "model folder '/nowhere' does not exist" in nowhere.stderr) == (1, True)
    failed = penstock(deployment, "rpc", "nothing", "--args", "[1]")
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: collective_rpc failed at 1 of 1 engines: ")
    assert failed.stderr.count("\n") == 1
    unknown = penstock(deployment, "status", "--engine", "nobody")
    assert (unknown.returncode, "no engine 'nobody' of model 'demo' has a heartbeat" in unknown.stderr) == (1, True)
    wrong = penstock(deployment, "rpc", "device_info", "--args", "{}")
    assert (wrong.returncode, wrong.stderr) == (2, "error: --args must be a JSON array, got {}\n")
