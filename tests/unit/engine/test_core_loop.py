"""The loop of an engine core's process: a request on which the core fails ends alone."""

from __future__ import annotations

import errno
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from penstock.shared.errors import DeviceMemoryError, EngineDeadError
from penstock.shared.messages.core import CoreOutput, EngineCoreOutputs, SchedulerStats, Shutdown
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.core.interface import Core
from penstock.worker.core.loop import CoreLoop, lacks_memory
from penstock.worker.processes.ipc import CoreChannel, FrameSplitter, frame, socket_pair
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


class PreparingCore(FailingCore):
    """A core that has three parts to prepare, and lets a message arrive during the second."""

    def __init__(self, send: Callable[[], None]) -> None:
        super().__init__(RuntimeError)
        self._send = send
        self.num_left = 3
        self.num_left_at_requests: list[int] = []

    def add_request(self, message: EngineCoreRequest) -> None:
        self.num_left_at_requests.append(self.num_left)
        super().add_request(message)

    def check_invariants(self) -> None:
        """Check nothing."""

    def prepare_more(self) -> bool:
        self.num_left -= 1
        if self.num_left == 1:
            self._send()
        return self.num_left > 0


def test_a_pause_prepares_part_by_part_until_a_message_arrives() -> None:
    ours, theirs = socket_pair()

    def send() -> None:
        for message in (
            EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams()),
            Shutdown(),
        ):
            ours.sendall(frame(msgspec.msgpack.encode(message)))

    core = PreparingCore(send)
    with ours, theirs:
        engine: Any = SimpleNamespace(core=cast(Core, core), control=None)
        CoreLoop(CoreChannel(theirs), engine, ProgressWriter()).run([])
    assert core.num_left_at_requests == [1]
    assert core.added == ["r"]


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


def test_lack_of_memory_is_recognized_below_other_errors() -> None:
    torchs = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    for cause in (MemoryError(), torchs, OSError(errno.ENOMEM, "mmap"), DeviceMemoryError("16 MiB is free")):
        wrapped = ValueError("the model cannot be loaded")
        wrapped.__cause__ = cause
        assert lacks_memory(cause)
        assert lacks_memory(wrapped)
    assert not lacks_memory(OSError(errno.ENOENT, "no file"))
    assert not lacks_memory(None)
