"""The loop of an engine core's process: a request on which the core fails ends alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from penstock.shared.errors import EngineDeadError
from penstock.shared.messages.core import CoreOutput, EngineCoreOutputs, SchedulerStats, Shutdown
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.core.interface import Core
from penstock.worker.core.loop import CoreLoop
from penstock.worker.processes.ipc import CoreChannel, FrameSplitter, socket_pair
from penstock.worker.processes.progress import ProgressWriter

from ...every_exception import EVERY_EXCEPTION, name_of, raising


class FailingCore:
    """A core that takes every request but those called "failing"."""

    has_work = False
    num_unfinished_requests = 0
    device_memory_bytes = 0

    def __init__(self, kind: type[BaseException]) -> None:
        self._kind = kind
        self.added: list[str] = []
        self.aborted: list[str] = []

    def add_request(self, message: EngineCoreRequest) -> None:
        """Take a request, or fail."""
        if message.request_id == "failing":
            raising(self._kind)()
        self.added.append(message.request_id)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Record the requests that are aborted."""
        self.aborted += request_ids

    def stats(self) -> SchedulerStats:
        """Return nothing of interest."""
        return SchedulerStats()

    def take_step_stats(self) -> None:
        """Return nothing."""

    def take_lora_digests(self) -> None:
        """Return nothing."""


def run(core: FailingCore) -> list[EngineCoreOutputs]:
    """Hand the core two requests, and return its messages."""
    ours, theirs = socket_pair()
    with ours, theirs:
        engine: Any = SimpleNamespace(core=cast(Core, core), control=None)
        requests = [
            EngineCoreRequest(request_id=request_id, prompt_token_ids=[1], sampling_params=SamplingParams())
            for request_id in ("failing", "fine")
        ]
        CoreLoop(CoreChannel(theirs), engine, ProgressWriter()).run([*requests, Shutdown()])
        theirs.close()
        ours.setblocking(True)
        data = b"".join(iter(lambda: ours.recv(1 << 16), b""))
    return [msgspec.msgpack.decode(payload, type=CoreOutput) for payload in FrameSplitter().feed(data)]


@pytest.mark.parametrize("kind", EVERY_EXCEPTION, ids=name_of)
def test_a_request_on_which_the_core_fails_ends_alone(kind: type[BaseException]) -> None:
    core = FailingCore(kind)
    (outputs,) = run(core)
    (output,) = outputs.outputs
    assert (output.request_id, output.finish_reason) == ("failing", FinishReason.ERROR)
    assert output.error is not None
    assert output.error.code == "request_failed"
    assert kind.__name__ in output.error.message
    assert (core.added, core.aborted) == (["fine"], ["failing"])


def test_a_dead_engine_is_no_failure_of_a_request() -> None:
    with pytest.raises(EngineDeadError):
        run(FailingCore(EngineDeadError))
