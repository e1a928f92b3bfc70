"""When a core counts as stalled; by a clock that the tests turn."""

from __future__ import annotations

import re

import msgspec
import pytest

from penstock.worker.processes.progress import Phase, Progress
from penstock.worker.serving.core.stall import StallWatch

TIMEOUT_S = 10.0


class Core:
    """A core's progress and the time, both set by the test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.num_messages_sent = 0
        self.progress = Progress(phase=Phase.IDLE)
        self.waited_s = 0.0
        self.watch = StallWatch(self, TIMEOUT_S, lambda: self.waited_s, clock=lambda: self.now)

    def read(self) -> Progress:
        return self.progress

    def set(self, **fields: object) -> None:
        self.progress = msgspec.structs.replace(self.progress, **fields)

    def pass_time(self, seconds: float, interval_s: float = 0.5, starved: float = 0.0) -> str | None:
        """Look every ``interval_s``, until a stall is found or the time is over; ``starved`` is a share of it."""
        end = self.now + seconds
        while self.now < end:
            self.now += interval_s
            self.waited_s += starved * interval_s
            finding = self.watch.check()
            if finding is not None:
                return finding
        return None


@pytest.fixture
def core() -> Core:
    core = Core()
    core.watch.check()
    return core


def test_requests_without_a_step_are_a_stall(core: Core) -> None:
    core.set(phase=Phase.STEPPING, num_unfinished_reqs=3, step_counter=7)
    assert core.pass_time(TIMEOUT_S) is None
    finding = core.pass_time(1.0)
    assert finding == "the engine core made no step for 10.0 s while it held 3 requests"


def test_messages_that_are_not_taken_are_a_stall(core: Core) -> None:
    """A core that was stopped while it had nothing to do holds no request."""
    core.num_messages_sent = 1
    finding = core.pass_time(TIMEOUT_S + 1)
    assert finding == "the engine core made no step for 10.0 s while 1 message waited for it"


def test_more_messages_are_no_progress(core: Core) -> None:
    core.set(phase=Phase.STEPPING, num_unfinished_reqs=1)
    findings = []
    for _ in range(12):
        core.num_messages_sent += 1
        findings.append(core.pass_time(1.0))
    assert any(findings)


def test_an_idle_core_does_not_stall(core: Core) -> None:
    assert core.pass_time(1000) is None
    assert not core.watch.is_stalling


def test_idle_time_does_not_count_when_work_arrives(core: Core) -> None:
    core.pass_time(1000)
    core.num_messages_sent = 1
    assert core.pass_time(TIMEOUT_S - 1) is None


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.COMPILING])
def test_loading_and_compiling_have_no_time_limit(core: Core, phase: Phase) -> None:
    core.set(phase=phase, num_unfinished_reqs=2)
    core.num_messages_sent = 5
    assert core.pass_time(1000) is None
    assert not core.watch.is_stalling


def test_the_time_of_compiling_does_not_count_when_it_is_over(core: Core) -> None:
    core.set(phase=Phase.STEPPING, num_unfinished_reqs=1)
    core.pass_time(6)
    core.set(phase=Phase.COMPILING, phase_entered_ns=1)
    core.pass_time(5)
    core.set(phase=Phase.STEPPING, phase_entered_ns=2)
    assert core.pass_time(9) is None


def test_a_slow_step_is_no_stall(core: Core) -> None:
    core.set(phase=Phase.STEPPING, num_unfinished_reqs=1)
    for step in range(20):
        core.set(step_counter=step)
        assert core.pass_time(TIMEOUT_S - 1) is None


def test_five_seconds_without_a_step_are_stalling_and_no_alarm(core: Core) -> None:
    core.set(phase=Phase.STEPPING, num_unfinished_reqs=1)
    assert core.pass_time(4.5) is None
    assert not core.watch.is_stalling
    assert core.pass_time(1.0) is None
    assert core.watch.is_stalling
    core.set(step_counter=1)
    assert core.pass_time(0.5) is None
    assert not core.watch.is_stalling


def test_time_in_which_the_worker_process_did_not_run_does_not_count(core: Core) -> None:
    core.set(phase=Phase.STEPPING, num_unfinished_reqs=1)
    assert core.pass_time(9) is None
    assert core.pass_time(30, interval_s=30) is None
    assert not core.watch.is_stalling
    assert core.pass_time(9) is None
    assert core.pass_time(2) is not None


def test_a_starved_worker_process_raises_no_alarm(core: Core) -> None:
    core.set(phase=Phase.STEPPING, num_unfinished_reqs=1)
    assert core.pass_time(300, interval_s=2.0) is None


def test_time_in_which_the_core_waited_for_a_processor_does_not_count(core: Core) -> None:
    core.set(phase=Phase.STEPPING, num_unfinished_reqs=1)
    assert core.pass_time(300, starved=1.0) is None
    assert not core.watch.is_stalling
    assert core.pass_time(2 * TIMEOUT_S - 1, starved=0.5) is None
    assert core.watch.is_stalling
    finding = core.pass_time(2)
    assert finding is not None
    assert re.search(
        r"for 10\.\d s while it held 1 request, 3\d\d\.\d s of waiting for a processor not counted", finding
    )


def test_waiting_before_the_last_step_excuses_nothing_after_it(core: Core) -> None:
    core.set(phase=Phase.STEPPING, num_unfinished_reqs=1)
    assert core.pass_time(100, starved=1.0) is None
    core.set(step_counter=1)
    assert core.pass_time(TIMEOUT_S) is None
    assert core.pass_time(1) == "the engine core made no step for 10.0 s while it held 1 request"


async def test_run_returns_the_finding() -> None:
    core = Core()
    watch = StallWatch(core, 0.2, lambda: 0.0)
    core.set(phase=Phase.STEPPING, num_unfinished_reqs=1)
    assert (await watch.run()).endswith("while it held 1 request")
