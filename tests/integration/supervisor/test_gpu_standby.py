"""A second process of an engine on a GPU, which loads the weights itself.

The processes are stubs, and so is the driver's program that tells how much memory is free.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.shared.control.calls import Utility
from penstock.shared.control.engine import KV_CACHE, SleepState, WakeUp
from penstock.shared.errors import ConfigurationError, EngineCallError
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.processes import gpu
from penstock.worker.serving.core.cache import allocate_cache
from penstock.worker.supervisor import engine_process

from ...conftest import DEMO_MODEL
from .stub_host import MODEL, StartHost, eventually

GPU = EngineConfig(model=str(DEMO_MODEL), served_model_name=MODEL, device="cuda", kv_cache_memory=1 << 30)


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Overrides the project's, as in ``test_restarts``."""


@pytest.fixture
def free_mib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File with the free memory of the GPU."""
    file, program = tmp_path / "free", tmp_path / "bin" / "nvidia-smi"
    # Its process reports 3 GiB, of which a second one has no cache of 1 GiB; and a context.
    file.write_text(str(3 << 10))
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nread free < {file}\necho $free\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setattr(gpu, "FREE_TIMEOUT_S", 0.0)
    return file


async def test_it_takes_over_while_the_gpu_has_room(start_host: StartHost, tmp_path: Path, free_mib: Path) -> None:
    options = {"engine": GPU, "standby": True, "visible_devices": "0", "fork_server": str(tmp_path / "none")}
    host = await start_host(**options)
    engine = host.engines[0]
    await eventually(lambda: engine.standby.waiting_process)
    waiting = engine.standby.waiting_process
    assert waiting is not None
    assert waiting.config.weights_keeper == ""
    host.process(0).kill()
    await host.until_restarted(0)
    assert engine.process is waiting

    # Another one follows, and one that dies is replaced.
    await eventually(lambda: engine.standby.waiting_process)
    waiting = engine.standby.waiting_process
    assert waiting is not None
    waiting.kill()
    await eventually(lambda: engine.standby.waiting_process not in (None, waiting))
    await host.drain()
    assert await host.result()


async def test_a_supervisor_that_leaves_waits_for_its_end(
    start_host: StartHost, tmp_path: Path, free_mib: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await start_host(engine=GPU, standby=True, visible_devices="0", fork_server=str(tmp_path / "none"))
    await eventually(lambda: host.engines[0].standby.waiting_process)
    call_later, kill = asyncio.get_running_loop().call_later, engine_process.kill_process_tree
    monkeypatch.setattr(engine_process, "kill_process_tree", lambda pid: call_later(0.5, kill, pid))
    await host.drain()
    assert await host.result()


async def test_without_room_there_is_none(
    start_host: StartHost, tmp_path: Path, free_mib: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    free_mib.write_text("1000")
    options = {"engine": GPU, "standby": True, "visible_devices": "0", "fork_server": str(tmp_path / "none")}
    host = await start_host(**options)
    log = ""

    def is_logged() -> bool:
        nonlocal log
        log += "".join(capfd.readouterr())
        return "standby_missing" in log

    await eventually(is_logged)
    reason = "1000 MiB of GPU 0 are free, and a second process takes 3.0 GiB: lower kv_cache_memory, or leave --standby"
    assert reason in log
    assert host.engines[0].standby.waiting_process is None
    # Without it a new process continues.
    host.process(0).kill()
    await host.until_restarted(0)


async def test_an_engine_that_sleeps_has_none(start_host: StartHost, tmp_path: Path, free_mib: Path) -> None:
    options = {"engine": GPU, "standby": True, "visible_devices": "0", "fork_server": str(tmp_path / "none")}
    (tmp_path / "h-0").write_text("doze")
    host = await start_host(**options)
    await eventually(lambda: host.engines[0].process.sleep_level == 1)
    assert host.engines[0].standby.waiting_process is None


async def test_the_cache_is_allocated_once_memory_is_free() -> None:
    num_calls = 0

    async def call(utility: Utility) -> SleepState:
        nonlocal num_calls
        num_calls += 1
        assert utility == WakeUp([KV_CACHE])
        if num_calls < 3:
            raise EngineCallError("the engine still sleeps, because kv_cache could not be restored")
        return SleepState()

    await allocate_cache(call)
    assert num_calls == 3

    async def never(_: Utility) -> SleepState:
        raise EngineCallError("the engine still sleeps")

    with pytest.raises(EngineCallError):
        await asyncio.wait_for(allocate_cache(never, timeout_s=0.0), None)


def test_engines_that_can_have_none() -> None:
    def config(engine: EngineConfig) -> WorkerConfig:
        return WorkerConfig(worker_id="w", engine_id="w-0", redis_url="redis://h", engine=engine, standby=True)

    with pytest.raises(ConfigurationError, match="needs kv_cache_memory: the KV cache that one process has after"):
        config(EngineConfig(model="m", device="cuda"))
    with pytest.raises(ConfigurationError, match="of one rank, but the engine has 2 ranks; leave --standby out"):
        config(EngineConfig(model="m", tensor_parallel_size=2))
    config(GPU)
