"""Worker processes that say nothing: those that are stopped or hang are replaced, and nobody else. Stub workers."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.shared.connection import CommandConnection
from penstock.shared.messages.supervision import STALLED
from penstock.worker.supervisor import EngineStartError, engine_process, supervisor
from penstock.worker.supervisor.restart import Phase

from .stub_host import StartHost, StubHost, eventually, use_stub_workers


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Overrides the project's: a supervisor spawns processes and reads /proc in its loop, which serves nobody else."""


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_a_silent_worker_is_killed_and_restarted(start_host: StartHost, is_stopped: bool) -> None:
    host = await start_host(stall_timeout_s=2.0)
    engine = host.engines[0]
    if is_stopped:
        host.process(0).suspend()
    else:
        first = engine.process
        host.tell(0, "mute")
        host.process(0).kill()
        await eventually(lambda: engine.process is not first and engine.process.has_reported)  # knows what it is to do
        host.tell(0, "serve")
    how = "it was stopped" if is_stopped else "it hangs"
    await eventually(lambda: engine.death and re.fullmatch(rf".* said nothing for .*: {how}", engine.death.reason))
    death = engine.death
    assert death is not None
    assert death.is_external == is_stopped
    await eventually(lambda: engine.policy.phase is Phase.SERVING and engine.process.alive)


async def test_a_worker_that_is_stopped_while_it_loads_ends_the_start(
    commands: CommandConnection, redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The death of a first engine during the start ends the supervisor, with the reason."""
    use_stub_workers(monkeypatch, tmp_path)
    (tmp_path / "h-0").write_text("load")
    config = {"redis_url": redis_url, "namespace": namespace, "stall_timeout_s": 2.0}
    host = StubHost(commands, tmp_path, 1, config)
    monkeypatch.setattr(supervisor, "START_NOTICE_INTERVAL_S", 0.01)
    try:
        with capture_logs() as events:
            await eventually(lambda: any(event["event"] == "start_waits_for_engines" for event in events))
        (description,) = next(e for e in events if e["event"] == "start_waits_for_engines")["engines"].values()
        assert re.fullmatch(r"starting, process \d+, last report \d+ s ago", description)
        await eventually(lambda: host.engines[0].process.has_reported)
        host.process(0).suspend()
        with pytest.raises(EngineStartError, match=r"said nothing for .*: it was stopped"):
            await asyncio.wait_for(asyncio.shield(host.running), 120)
    finally:
        await host.destroy()


async def test_a_reporting_worker_has_no_load_limit(
    commands: CommandConnection, redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_stub_workers(monkeypatch, tmp_path)
    (tmp_path / "h-0").write_text("load")
    config = {"redis_url": redis_url, "namespace": namespace, "stall_timeout_s": 0.5}
    host = StubHost(commands, tmp_path, 1, config)
    try:
        await eventually(lambda: host.engines[0].process.has_reported)
        loaded_until = asyncio.get_running_loop().time() + 4
        await eventually(lambda: host.running.done() or host.engines[0].process.last_report_at > loaded_until)
        assert host.engines[0].death is None
    finally:
        await host.destroy()


async def test_a_worker_that_waits_for_a_processor_is_not_taken_for_dead(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test replaces the kernel's waiting time: first all of the time, later none."""
    host = await start_host(stall_timeout_s=0.5)
    clock = asyncio.get_running_loop().time
    silent, is_starved, num_looks, told = host.process(0).pid, True, 0, 0.0

    def waited(pid: int) -> float:
        nonlocal num_looks, told
        if pid != silent:
            return 0.0
        num_looks += 1
        told = clock() if is_starved else told
        return told

    monkeypatch.setattr(engine_process, "waited_for_processor_s", waited)
    last_report_at = host.engines[0].process.last_report_at
    await eventually(lambda: host.engines[0].process.last_report_at > last_report_at)
    host.process(0).suspend()
    num_looks = 0
    await eventually(lambda: num_looks >= 10 or host.engines[0].death)
    assert host.engines[0].death is None
    is_starved = False
    await eventually(lambda: host.engines[0].death is not None)
    assert host.engines[0].death is not None
    assert "said nothing" in host.engines[0].death.reason
    assert host.engines[0].death.code == STALLED


async def test_a_blocked_supervisor_declares_no_engine_dead(start_host: StartHost) -> None:
    host = await start_host(2, stall_timeout_s=2.0)
    time.sleep(4)  # noqa: ASYNC251 - the point: its loop, which runs here, stands still
    looked = asyncio.get_running_loop().time()
    await eventually(lambda: all(engine.process.last_report_at > looked + 1 for engine in host.engines))
    assert [engine.death for engine in host.engines] == [None, None]
