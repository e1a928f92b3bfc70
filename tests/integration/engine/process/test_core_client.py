"""A real engine core behind a ``CoreClient``: its progress is seen from outside, and so is why it ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.messages.core import EngineCoreOutputs
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.processes.progress import Phase
from penstock.worker.serving.core.client import CoreClient, CoreLostError
from penstock.worker.serving.core.process import ForkServer
from penstock.worker.serving.core.stall import StallWatch
from penstock.worker.supervisor.fork_server import FORK_SERVER_VARIABLE

from ....processes import DEADLINE_S
from ...gated_weights import GatedModel
from ..harness import Gate, request, write_model_with_code

STALL_TIMEOUT_S = 1.0

FAULTY_MODEL = """
from transformers import LlamaForCausalLM

class Panic(BaseException):
    pass

class FaultyLlamaForCausalLM(LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        if (input_ids == 6).any():
            raise Panic("no way")
        return super().forward(input_ids=input_ids, **kwargs)
"""


class Core:
    """A client, and what its core has sent."""

    def __init__(self) -> None:
        fork_server = os.environ[FORK_SERVER_VARIABLE]
        self.client = CoreClient(self._on_outputs, engine_id=uuid.uuid4().hex, fork_servers=[ForkServer(fork_server)])
        self.num_tokens = 0
        self._came = asyncio.Event()

    async def start(self, model: Path, **options: Any) -> None:
        config = EngineConfig(model=str(model), num_threads=1, max_num_seqs=4, **options)
        await self.client.start(config, None)

    async def tokens(self, count: int) -> None:
        """Wait for so many more tokens."""
        due = self.num_tokens + count
        while self.num_tokens < due:
            self._came.clear()
            await self._came.wait()

    async def idle(self) -> None:
        """Wait until it has taken all messages and has nothing to do."""
        progress = self.client.progress
        while (now := progress.read()).phase is not Phase.IDLE or now.num_messages_taken < progress.num_messages_sent:
            await asyncio.sleep(0.001)

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        self.num_tokens += sum(len(output.new_token_ids) for output in outputs.outputs)
        self._came.set()


@pytest.fixture
async def core() -> AsyncIterator[Core]:
    async with asyncio.timeout(DEADLINE_S):
        core = Core()
        yield core
        if core.client.pid and not core.client.dead.is_set():
            os.kill(core.client.pid, signal.SIGKILL)
        await core.client.stop()


@pytest.fixture
def faulty_model(demo_model: Path, tmp_path: Path) -> Path:
    """The demo model, which raises at token 6 what no engine expects."""
    return write_model_with_code(tmp_path / "faulty", demo_model, "FaultyLlamaForCausalLM", FAULTY_MODEL)


async def test_progress_of_a_core_is_readable_while_it_runs(core: Core, gate: Gate, gated_model: Path) -> None:
    client = core.client
    assert client.progress.read().phase is Phase.STARTING
    await core.start(gated_model, trust_remote_code=True)
    client.add_request(request("a", [10, 11], max_tokens=20))
    await core.tokens(20)
    await core.idle()
    before = client.progress.read()
    assert before.step_counter >= 20
    assert (before.num_unfinished_reqs, before.num_messages_taken) == (0, 2)
    client.add_request(request("b", [10, 5], max_tokens=1000))
    await asyncio.to_thread(gate.await_arrival)
    within = client.progress.read()
    assert (within.phase, within.num_unfinished_reqs) == (Phase.STEPPING, 1)
    assert within.num_messages_taken == client.progress.num_messages_sent == 3
    client.abort_requests(["b"])
    gate.open()
    await core.idle()
    idle = client.progress.read()
    assert (idle.num_unfinished_reqs, idle.num_messages_taken) == (0, 4)
    assert idle.step_counter > before.step_counter
    assert idle.step_ended_ns > before.step_ended_ns


@pytest.mark.parametrize("is_busy", [True, False])
async def test_a_core_that_was_stopped_stalls_and_is_not_to_blame(
    core: Core, gate: Gate, gated_model: Path, is_busy: bool
) -> None:
    await core.start(gated_model, trust_remote_code=True)
    if is_busy:
        core.client.add_request(request("a", [10, 11], max_tokens=5))
        await core.tokens(5)
        core.client.add_request(request("b", [10, 5]))
        await asyncio.to_thread(gate.await_arrival)
    watch = StallWatch(core.client.progress, STALL_TIMEOUT_S, lambda: 0.0)
    os.kill(core.client.pid, signal.SIGSTOP)
    if not is_busy:
        core.client.add_request(request("a", [10, 11]))
    finding = await watch.run()
    assert watch.is_stalling
    core.client.kill(finding)
    death = await core.client.end()
    held = "it held 1 request" if is_busy else "1 message waited for it"
    assert re.search(rf"made no step for \d+\.\d s while {held}: it was stopped by a signal$", death.reason)
    assert death.is_external
    assert (death.last_step > 0) == is_busy


async def test_a_hanging_core_reports_its_position(core: Core, gate: Gate, gated_model: Path) -> None:
    await core.start(gated_model, trust_remote_code=True)
    core.client.add_request(request("a", [10, 5]))
    await asyncio.to_thread(gate.await_arrival)
    core.client.kill(await StallWatch(core.client.progress, STALL_TIMEOUT_S, lambda: 0.0).run())
    death = await core.client.end()
    assert "while it held 1 request" in death.reason
    assert not death.is_external
    assert "modeling_own.py" in death.trace


# A core that has made a grammar has a library whose own handler takes the place of Python's.
_GRAMMAR = StructuredOutputsParams(regex="[0-9]{2000}")


@pytest.mark.parametrize(
    ("number", "is_external", "grammar"),
    [(signal.SIGKILL, True, None), (signal.SIGSEGV, False, _GRAMMAR), (signal.SIGABRT, False, None)],
)
async def test_a_killed_core(
    core: Core, demo_model: Path, number: signal.Signals, is_external: bool, grammar: StructuredOutputsParams | None
) -> None:
    await core.start(demo_model)
    core.client.add_request(request("a", [10, 11], max_tokens=2000, structured_outputs=grammar))
    await core.tokens(5)
    os.kill(core.client.pid, number)
    death = await core.client.end()
    assert death.reason == f"the engine core was killed by {number.name}"
    assert death.is_external == is_external
    assert death.last_step >= 5
    if is_external:
        assert death.trace == ""
    else:
        assert death.trace.startswith("Fatal Python error: ")
        assert "run_engine_core" in death.trace
        assert "Extension modules" not in death.trace


async def test_a_core_that_raises_leaves_its_traceback(core: Core, faulty_model: Path) -> None:
    """An ``Exception`` fails only a request; a panic of a library in Rust is not an ``Exception``."""
    await core.start(faulty_model, trust_remote_code=True)
    core.client.add_request(request("a", [10, 6]))
    death = await core.client.end()
    assert death.reason.startswith("the engine core died of ")
    assert death.reason.endswith("Panic: no way")
    assert not death.is_external
    assert "modeling_own.py" in death.trace


async def test_a_core_that_is_killed_while_it_loads(core: Core, tmp_path: Path) -> None:
    model = GatedModel(tmp_path / "model")
    model.shut()
    starting = asyncio.create_task(core.start(model.folder))
    while not core.client.pid:
        await asyncio.sleep(0.001)
    os.kill(core.client.pid, signal.SIGKILL)
    with pytest.raises(CoreLostError, match="killed by SIGKILL during start-up") as lost:
        await starting
    assert lost.value.death.is_external
