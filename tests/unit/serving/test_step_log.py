from __future__ import annotations

from pathlib import Path

from penstock.shared.messages.core import EngineCoreOutputs, SchedulerStats
from penstock.shared.stats import StepStats, decode_steps
from penstock.worker.serving.reporting.engine_meter import STEPS_PER_WRITE, StepLog


def outputs(at_s: float, num_running: int, step_s: float = 0.5) -> EngineCoreOutputs:
    stats = SchedulerStats(num_running_reqs=num_running)
    return EngineCoreOutputs([], stats, at_s, StepStats(num_reqs=1, execute_time_s=step_s))


def test_a_steps_time_includes_the_gap_before_it_unless_idle(tmp_path: Path) -> None:
    log = StepLog(str(tmp_path / "new"), "e0")
    for at_s, num_running in ((10.0, 1), (10.75, 1), (11.5, 0), (20.0, 1)):
        log.record(outputs(at_s, num_running))
    log.record(EngineCoreOutputs([], SchedulerStats(), 21.0))  # a word without a step: nothing runs any more
    log.record(outputs(30.0, 0))
    log.write()
    steps = decode_steps((tmp_path / "new" / "e0.steps.jsonl").read_bytes())
    assert [step.took_s for step in steps] == [0.5, 0.75, 0.75, 0.5, 0.5]
    assert [step.ended_s for step in steps] == [10.0, 10.75, 11.5, 20.0, 30.0]


def test_steps_are_written_immediately_and_a_failing_disk_ends_the_log(tmp_path: Path) -> None:
    log, file = StepLog(str(tmp_path), "e0"), tmp_path / "e0.steps.jsonl"
    for number in range(STEPS_PER_WRITE + 1):
        log.record(outputs(number, 1))
    assert len(decode_steps(file.read_bytes())) == STEPS_PER_WRITE
    file.unlink()
    file.mkdir()
    log.write()
    for number in range(STEPS_PER_WRITE):
        log.record(outputs(number, 1))
    assert [*file.iterdir()] == []


def test_without_a_folder_nothing_is_written() -> None:
    log = StepLog("", "e0")
    for number in range(STEPS_PER_WRITE):
        log.record(outputs(number, 1))
    log.write()
