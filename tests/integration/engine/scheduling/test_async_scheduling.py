"""The same requests one batch at a time and one batch ahead: the same tokens, whatever they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.shared.control.engine import CheckInvariants, Invariants, Sleep, SleepState, WakeUp
from penstock.shared.messages.core import AbortRequests, Ready, UtilityCall
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.composition import build_engine
from penstock.worker.engine.core.engine_core import STEP_FAILED
from penstock.worker.engine.core.in_flight import LookaheadCore
from penstock.worker.engine.core.step_input import IntArray
from penstock.worker.engine.execution.overlap import FeedingRunner, PinnedCopy
from penstock.worker.engine.scheduling.batches import BatchQueue

from ....conftest import DEMO_MODEL
from ..harness import CoreProcess, Gate, request
from ..mixed_load import KINDS, assert_equal, config, requests, run, too_many


class Late:
    """Copies whose numbers the host has when it waits for them, and not before.

    Attributes:
        most_unread: most copies that were under way at the same time.
        failing: number of the copy that fails.
    """

    def __init__(self, failing: int | None = None) -> None:
        self._num_begun = self._num_unread = self.most_unread = 0
        self.failing = failing

    def __call__(self, numbers: torch.Tensor) -> LateCopy:
        self._num_begun += 1
        self._num_unread += 1
        self.most_unread = max(self.most_unread, self._num_unread)
        return LateCopy(self, numbers, self._num_begun)

    def read(self, number: int) -> None:
        self._num_unread -= 1
        if number == self.failing:
            raise torch.AcceleratorError("lost")


class LateCopy:
    def __init__(self, late: Late, numbers: torch.Tensor, number: int) -> None:
        self._late, self._numbers, self._number = late, numbers, number

    def wait(self) -> IntArray:
        self._late.read(self._number)
        return PinnedCopy(self._numbers).wait()


def fed_core(late: Late, **options: Any) -> LookaheadCore:
    """A core as on a GPU, whose steps feed each other."""
    engine = build_engine(config(async_scheduling=True, **options), DEMO_MODEL)
    assert isinstance(engine.core, LookaheadCore)
    engine.core._batch_queue = BatchQueue(FeedingRunner(engine.runner, late))
    return engine.core


@pytest.mark.parametrize("options", [{}, {"scheduling_policy": "priority", "enable_prefix_caching": False}], ids=str)
def test_tokens_are_those_of_the_plain_step(options: dict[str, Any]) -> None:
    plain, ahead = (
        build_engine(config(async_scheduling=is_ahead, **options), DEMO_MODEL).core for is_ahead in (False, True)
    )
    assert isinstance(ahead, LookaheadCore)
    assert ahead.step_fn == ahead.step_with_batch_queue
    late = Late()
    expected = run(plain, requests())
    for core in (ahead, fed_core(late, **options)):
        outputs = run(core, requests())
        assert core.scheduler.stats().num_preemptions > 0
        assert_equal(outputs, expected)
    assert late.most_unread == 2, "no step was launched before the tokens of the one before were read"


def test_requests_that_need_earlier_tokens_wait_for_them() -> None:
    """Steps of other requests are launched before the tokens of the step before are read."""
    late = Late()
    plain, fed = build_engine(config(), DEMO_MODEL).core, fed_core(late)
    feeding: list[int] = []
    for number, kind in enumerate(KINDS):
        late.most_unread = 0
        fields = {"max_tokens": 12, "ignore_eos": True, "seed": number, **kind}
        messages = [
            EngineCoreRequest(
                request_id=f"{number}-{row}",
                prompt_token_ids=[5 + number, 70 + row],
                sampling_params=SamplingParams(**fields),
            )
            for row in range(2)
        ]
        assert_equal(run(fed, messages), run(plain, messages))
        if late.most_unread == 2:
            feeding.append(number)
    # Not penalties, bad words of two tokens, log probabilities, and grammars.
    assert feeding == [0, 1, 2, 4, 7]


def test_tokens_that_cannot_be_read_end_their_requests() -> None:
    """Requests of the step that was launched meanwhile end as well, and the engine continues."""
    core = fed_core(Late(failing=6))
    for message in too_many():
        core.add_request(message)
    outputs = [output for _ in range(8) for output in core.step_fn()]
    failed = {output.request_id for output in outputs if output.error is not None}
    assert {output.error.code for output in outputs if output.error is not None} == {STEP_FAILED}
    assert failed
    core.check_invariants()
    rest = [message for message in too_many() if message.request_id in failed]
    plain = build_engine(config(), DEMO_MODEL).core
    while core.has_work:
        core.step_fn()
    assert_equal(run(core, rest), run(plain, [message for message in too_many() if message.request_id in failed]))


def test_calls_and_aborts_run_between_batches(core_process: CoreProcess, gate: Gate, gated_model: Path) -> None:
    """No batch is in flight during a call, and an engine emptied by an abort can sleep immediately."""
    gated = config(model=str(gated_model), trust_remote_code=True, async_scheduling=True)
    assert isinstance(core_process.start(gated.encode()), Ready)
    for number in range(4):
        core_process.send(request(str(number), [5 + number] * 20, max_tokens=60))
    gate.await_arrival()  # a batch is in flight
    core_process.send(UtilityCall(1, CheckInvariants()))
    core_process.send(AbortRequests([str(number) for number in range(4)]))
    core_process.send(UtilityCall(2, Sleep(level=1)))
    gate.open()
    told = core_process.answer()
    assert isinstance(told.answer, Invariants), told.error
    assert told.answer.num_running_reqs + told.answer.num_waiting_reqs == 4
    assert core_process.answer().error is None
    assert core_process.call(WakeUp()).answer == SleepState()
    core_process.send(request("after", [5] * 20, max_tokens=3))
    (tokens,) = core_process.collect(1).values()
    assert [output.request_id for output in tokens] == ["after"] * 3
