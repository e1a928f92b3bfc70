"""Engines that die are started again, one by one, and what they held moves on. Stub workers; see ``stub_host``."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import psutil
import pytest
import redis

from penstock.shared.errors import EngineDeadError
from penstock.shared.process import children
from penstock.worker import cli as worker_cli
from penstock.worker.supervisor import EngineStartError, engine_process
from penstock.worker.supervisor.restart import CRASH_LOOP_LIMIT, Death, Phase
from penstock.worker.supervisor.supervisor import StopMode

from ...processes import is_gone
from .stub_host import StartHost, StubHost, eventually, wait_for_redis

LONG_DELAY_S = 100.0


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Overrides the project's: a supervisor spawns processes and reads /proc in its loop, which serves nobody else."""


async def test_a_killed_worker_is_restarted_and_its_claims_are_back(start_host: StartHost) -> None:
    host = await start_host(2)
    await host.claim(0)
    other = host.process(1)
    host.process(0).kill()
    await host.until_restarted(0)
    assert await host.broker.state("r") == "queued"
    assert host.engines[0].death is not None
    assert host.engines[0].death.reason == "the worker process was killed by SIGKILL"
    assert host.engines[0].death.is_external
    assert host.process(1) == other
    assert host.engines[1].policy.num_restarts == 0
    await host.drain()
    assert await host.result() is True


async def test_an_engine_that_slept_starts_asleep_however_often_it_dies(start_host: StartHost) -> None:
    host = await start_host()
    host.tell(0, "sleep")
    host.process(0).kill()
    await host.until_restarted(0)
    await eventually(lambda: host.engines[0].process.sleep_level == 2)
    host.tell(0, "serve")
    for num_restarts in (2, 3):
        host.process(0).kill()
        await host.until_restarted(0, num_restarts)
        assert host.engines[0].process.config.starts_asleep == 2
    host.tell(0, "refuse")
    host.process(0).kill()
    await eventually(lambda: host.engines[0].death and host.engines[0].death.reason == "there is no such model")
    assert host.engines[0].process.config.starts_asleep == 2


async def test_claims_are_back_before_the_next_life(start_host: StartHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise claims of the next process under the same name would be reclaimed."""
    host = await start_host()
    await host.claim(0)
    engine, reclaim = host.engines[0], host.supervisor._reaper.reclaim
    seen: list[tuple[Phase, bool, str | None]] = []

    async def watched_reclaim(engine_id: str, death: Death, **how: bool) -> None:
        await reclaim(engine_id, death, **how)
        seen.append((engine.policy.phase, engine.process.alive, await host.broker.state("r")))

    monkeypatch.setattr(host.supervisor._reaper, "reclaim", watched_reclaim)
    host.process(0).kill()
    await host.until_restarted(0)
    assert seen == [(Phase.DOWN, False, "queued")]


@pytest.mark.parametrize("behaviour", ["lose-core", "print", "linger"])
async def test_a_lost_core_is_the_engines_own_death(start_host: StartHost, behaviour: str) -> None:
    host = await start_host()
    host.tell(0, behaviour)
    host.process(0).kill()
    await eventually(lambda: host.engines[0].death and not host.engines[0].death.is_external)
    death = host.engines[0].death
    assert death is not None
    assert (death.reason, death.num_tokens) == ("the engine core died (killed by signal 11)", 7)
    assert host.engines[0].policy.num_barren_deaths == 0
    host.tell(0, "serve")
    policy = host.engines[0].policy
    await eventually(lambda: policy.phase is Phase.SERVING and host.engines[0].process.alive)


async def test_a_crash_looping_engine_is_abandoned_and_the_others_keep_serving(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "FIRST_DELAY_S", 0.001)
    host = await start_host(2)
    for index, behaviour, cause in ((0, "crash", "was killed by SIGABRT"), (1, "refuse", "there is no such model")):
        host.tell(index, behaviour)
        host.process(index).kill()
        engine = host.engines[index]
        await eventually(lambda engine=engine: engine.policy.phase is Phase.GIVEN_UP)
        assert engine.policy.num_barren_deaths == CRASH_LOOP_LIMIT
        if index == 0:
            await eventually(lambda: _is_given_up(host, 0))
            assert not host.running.done()
            assert host.engines[1].policy.phase is Phase.SERVING
        assert cause in engine.describe_death()
    with pytest.raises(EngineDeadError, match=r"no engine is left: .*SIGABRT; .* a token: there is no such model"):
        await host.result()


async def _is_given_up(host: StubHost, index: int) -> bool:
    beat = await host.heartbeat(index)
    return beat is not None and beat.restart_at == 0 and beat.error.startswith("given up after 8 deaths in a row")


async def test_worker_list_shows_error_and_restart_time_during_backoff(
    start_host: StartHost,
    monkeypatch: pytest.MonkeyPatch,
    redis_url: str,
    namespace: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    host = await _host_in_back_off(start_host, monkeypatch)
    beat = await host.until_listed_dead(0)
    assert beat.error == "there is no such model"
    assert beat.num_restarts == 2
    assert time.time() < beat.restart_at < time.time() + 1.5 * LONG_DELAY_S
    await asyncio.to_thread(worker_cli.main, ["list", "--redis-url", redis_url, "--namespace", namespace])
    assert re.search(r"^h-0 is dead, restarts in \d+ s: there is no such model$", capsys.readouterr().out, re.MULTILINE)


async def _host_in_back_off(start_host: StartHost, monkeypatch: pytest.MonkeyPatch) -> StubHost:
    """Build a host whose engine was killed from outside, failed to start at once, and waits long for its next start."""
    monkeypatch.setattr(children, "FIRST_DELAY_S", LONG_DELAY_S)
    monkeypatch.setattr(children, "MAX_DELAY_S", LONG_DELAY_S)
    host = await start_host()
    host.tell(0, "refuse")
    host.process(0).kill()
    policy = host.engines[0].policy
    await eventually(lambda: policy.phase is Phase.DOWN and policy.num_restarts == 2)
    return host


async def test_drain_while_the_engine_waits(start_host: StartHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host = await _host_in_back_off(start_host, monkeypatch)
    await host.until_listed_dead(0)
    await host.drain()
    assert await host.result() is True


async def test_drain_while_the_engine_starts_again(start_host: StartHost) -> None:
    host = await start_host(drain_timeout_s=60.0)
    host.tell(0, "load")
    host.process(0).kill()
    engine = host.engines[0]
    await eventually(lambda: engine.policy.phase is Phase.RESTARTING and engine.process.has_reported)
    host.process(0)
    await host.drain()
    assert await host.result() is True


async def test_kill_requeues_claimed_requests(start_host: StartHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host = await start_host()
    host.tell(0, "stubborn")
    host.process(0).kill()
    await host.until_restarted(0)
    await host.claim(0)
    stubborn = host.process(0)
    host.supervisor._escalate_stop(StopMode.DRAIN)
    host.supervisor._escalate_stop(StopMode.HAND_BACK)
    host.supervisor._escalate_stop(StopMode.KILL)
    assert await host.result() is False
    assert is_gone(stubborn)
    assert await host.broker.state("r") == "queued"


async def test_a_host_without_room_for_a_process(start_host: StartHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host = await start_host()
    command = engine_process.COMMAND
    monkeypatch.setattr(engine_process, "COMMAND", ("/nonexistent",))
    host.process(0).kill()
    await eventually(lambda: host.engines[0].death and "could not be started" in host.engines[0].death.reason)
    monkeypatch.setattr(engine_process, "COMMAND", command)
    await eventually(lambda: host.engines[0].policy.phase is Phase.SERVING)


async def test_death_while_redis_is_away(start_host: StartHost, redis_url: str) -> None:
    host = await start_host()
    await host.claim(0)
    with redis.Redis.from_url(redis_url) as client:
        server = psutil.Process(client.info("server")["process_id"])  # type: ignore[index]
    server.suspend()
    try:
        host.process(0).kill()
        await eventually(lambda: host.engines[0].policy.phase is Phase.DOWN)
    finally:
        server.resume()
    await host.until_restarted(0)
    assert await host.broker.state("r") == "queued"


async def test_leaving_while_redis_is_away(
    start_host: StartHost, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await start_host()
    wait_for_redis(monkeypatch, 1.0)
    with redis.Redis.from_url(redis_url) as client:
        server = psutil.Process(client.info("server")["process_id"])  # type: ignore[index]
    worker = host.process(0)
    server.suspend()
    try:
        worker.kill()
        await eventually(lambda: host.engines[0].policy.phase is Phase.DOWN)
        host.supervisor._on_signal()
        assert await asyncio.wait_for(asyncio.shield(host.running), 120.0) is True
    finally:
        server.resume()
    assert is_gone(worker)


async def test_an_engine_that_dies_before_all_serve_fails_the_start(start_host: StartHost, tmp_path: Path) -> None:
    (tmp_path / "h-0").write_text("load")
    (tmp_path / "h-1").write_text("crash")
    with pytest.raises(EngineStartError, match="killed by SIGABRT"):
        await start_host(2)
