"""An engine over two hosts: a real core, and `worker start` that runs the ranks of the other host, on the loopback."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.ops.lab.clusters.redis_processes import free_port
from penstock.shared.control.engine import CollectiveRpc, IsSleeping, Sleep, SleepState, WakeUp
from penstock.shared.control.model import ReloadWeights, SaveShardedState
from penstock.shared.messages.core import Ready
from penstock.worker.config.ranks import KEY_VARIABLE

from ....processes import DEADLINE_S
from ..adapters.peft_folders import lora_request
from ..harness import CoreProcess
from .test_ranks import ADAPTERS, ask, await_end, receive_for_ever, start, tokens

HOST = "127.0.0.1"


class OtherHost:
    """`worker start` of host 1, with the options that ``start`` passes to a core."""

    def __init__(self, model: Path, port: int) -> None:
        words = ["--threads", "1", "--max-num-seqs", "4", "--kv-cache-memory", str(1 << 24), "--device", "cpu"]
        words += ["--pipeline-parallel-size", "2", "--nnodes", "2", "--node-rank", "1"]
        words += ["--master-addr", HOST, "--master-port", str(port), "--enable-lora"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.worker.cli", "start", "--model", str(model), *words],
            stdout=subprocess.PIPE,
            text=True,
        )

    def await_ready(self) -> OtherHost:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("ready: host 1 waits")
        return self

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def cores() -> Iterator[Callable[[], CoreProcess]]:
    with ExitStack() as stack:

        def make() -> CoreProcess:
            core = CoreProcess()
            stack.callback(core.close)
            stack.callback(core.process.kill)
            return core

        yield make


def test_an_engine_of_two_hosts_starts_again_after_the_end_of_each_part(
    cores: Callable[[], CoreProcess],
    demo_model: Path,
    tmp_path: Path,
    warm_python: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "0123456789abcdef")
    alone = cores()
    assert isinstance(start(alone, demo_model, enable_lora=True), Ready)
    expected = tokens(alone)
    adapter = lora_request(sorted(ADAPTERS.iterdir())[0])
    adapted = tokens(alone, adapter)
    port = free_port()
    options: dict[str, Any] = {
        "pipeline_parallel_size": 2,
        "nnodes": 2,
        "master_addr": HOST,
        "master_port": port,
        "enable_lora": True,
    }

    def started() -> tuple[CoreProcess, psutil.Process]:
        core = cores()
        ready = start(core, demo_model, **options)
        assert isinstance(ready, Ready), ready
        assert ready.ranks is not None
        assert ready.ranks.describe() == "pp 2, 2 hosts"
        assert ready.ranks.local_pids == [core.process.pid]
        assert ready.ranks.hosts == ["", f"{socket.gethostname()} at {HOST}"]
        assert tokens(core) == expected
        return core, psutil.Process(ready.ranks.pids[1])

    with closing(OtherHost(demo_model, port).await_ready()):
        core, rank = started()
        check_calls(core, demo_model, tmp_path, expected)
        assert tokens(core, adapter) == adapted
        rank.kill()
        words = rf"RankKilledError: rank 1 \(process {rank.pid} of host .*\) was killed by SIGKILL"
        with pytest.raises(EOFError, match=words):
            receive_for_ever(core)

        core, rank = started()
        core.process.kill()
        await_end(rank)

        core, rank = started()
        rank.parent().kill()  # type: ignore[union-attr]  # the other host
        await_end(rank)
        with pytest.raises(EOFError, match=r"RankKilledError: rank 1 .* is lost: its host is unreachable"):
            receive_for_ever(core)

    with closing(OtherHost(demo_model, port)) as host:
        core, rank = started()
        host.process.terminate()
        with pytest.raises(EOFError, match=r"RankKilledError: rank 1 .* was stopped together with its host"):
            receive_for_ever(core)
        assert host.process.wait(DEADLINE_S) == 0
        await_end(rank)


def check_calls(core: CoreProcess, model: Path, folder: Path, expected: list[list[int]]) -> None:
    assert len(ask(core, CollectiveRpc("memory_summary")).result) == 2
    ask(core, Sleep(level=2))
    assert ask(core, IsSleeping()).level == 2
    assert ask(core, WakeUp()) == SleepState()
    assert tokens(core) == expected
    for call, words in (
        (SaveShardedState(str(folder)), "the ranks of the engine are on 2 hosts"),
        (ReloadWeights(path=str(model)), "the weights of an engine over several hosts stay"),
    ):
        refused = core.call(call)
        assert refused.error is not None
        assert refused.error.code == "engine_state"
        assert words in refused.error.message
