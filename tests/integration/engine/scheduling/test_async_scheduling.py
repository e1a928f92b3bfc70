"""The same requests one batch at a time and one batch ahead: the same tokens, whatever they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.shared.control.engine import CheckInvariants, Invariants, Sleep, SleepState, WakeUp
from penstock.shared.messages.core import AbortRequests, Ready, UtilityCall
from penstock.worker.engine.composition import build_engine
from penstock.worker.engine.core.in_flight import LookaheadCore

from ....conftest import DEMO_MODEL
from ..harness import CoreProcess, Gate, request
from ..mixed_load import assert_equal, config, requests, run


@pytest.mark.parametrize("options", [{}, {"scheduling_policy": "priority", "enable_prefix_caching": False}], ids=str)
def test_tokens_are_those_of_the_plain_step(options: dict[str, Any]) -> None:
    plain, ahead = (
        build_engine(config(async_scheduling=is_ahead, **options), DEMO_MODEL).core for is_ahead in (False, True)
    )
    assert isinstance(ahead, LookaheadCore)
    assert ahead.step_fn == ahead.step_with_batch_queue
    expected, found = run(plain, requests()), run(ahead, requests())
    assert ahead.scheduler.stats().num_preemptions > 0
    assert_equal(found, expected)


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
