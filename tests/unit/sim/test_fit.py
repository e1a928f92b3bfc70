from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest

from penstock.ops.sim.real.fit import error_of, fit_speed, read_recordings, work_of
from penstock.ops.sim.scenario import Engines
from penstock.ops.sim.speed import Speed
from penstock.shared.errors import ConfigurationError
from penstock.shared.stats import RecordedStep, StepStats, encode_steps

SPEED = Speed(
    fixed_ms=3.0,
    ms_per_seq=0.25,
    ms_per_prompt_token=0.125,
    ms_per_1000_context_tokens=0.5,
    ms_per_1000_prompt_pairs=0.0625,
)


def recorded(num_steps: int, speed: Speed = SPEED, *, factor: float = 1.0, began_s: float = 0.0) -> list[RecordedStep]:
    """Steps one after the other, each as long as a speed says, of which the engine computes one part in ``factor``."""
    random, steps, now_s = Random(num_steps), [], began_s
    for _ in range(num_steps):
        decoding, reading, prompt = random.randint(1, 32), random.randint(0, 2), random.randint(10, 300)
        tokens = prompt if reading else 0
        stats = StepStats(
            num_reqs=decoding + reading,
            num_prefill_reqs=reading,
            num_prefill_tokens=tokens,
            num_decode_tokens=decoding,
            num_context_tokens=decoding * random.randint(1, 1000),
            num_prefill_pairs=tokens * random.randint(1, 500),
        )
        own_s = speed.step_s(work_of(stats))
        stats = msgspec.structs.replace(stats, execute_time_s=factor * own_s, cpu_time_s=own_s)
        now_s += factor * own_s
        steps.append(RecordedStep(now_s, factor * own_s, stats))
    return steps


def parts(speed: Speed) -> tuple[float, ...]:
    return msgspec.structs.astuple(speed)


def test_the_fit_recovers_a_known_speed() -> None:
    steps = recorded(200)
    fit = fit_speed([steps])
    assert parts(fit.speed) == pytest.approx(parts(SPEED), abs=1e-4)
    assert fit.slowdown == [1.0]
    assert fit.num_steps == 200
    assert error_of(Engines(number=1, speed=fit.speed), [steps]).of_step < 1e-3


def test_a_step_that_was_held_up_does_not_count_for_more() -> None:
    steps = recorded(200)
    held_up = [
        msgspec.structs.replace(step, stats=msgspec.structs.replace(step.stats, cpu_time_s=step.took_s + 0.2))
        for step in steps[::10]
    ]
    assert parts(fit_speed([steps + held_up]).speed) == pytest.approx(parts(SPEED), abs=1e-2)


def test_engines_that_share_processors_have_one_speed_and_take_longer_together() -> None:
    """Two at once for as long as the shorter recording lasts, which wait for each other as long as they compute; then
    one alone."""
    together = recorded(200, factor=2.0)
    alone = recorded(300, began_s=together[-1].ended_s)
    fit = fit_speed([[*recorded(200, factor=2.0), *alone], together])
    assert parts(fit.speed) == pytest.approx(parts(SPEED), abs=1e-3)
    assert fit.slowdown == pytest.approx([1.0, 2.0], abs=0.02)
    fitted = Engines(number=2, speed=fit.speed, slowdown=fit.slowdown)
    assert abs(error_of(fitted, [alone]).of_total) < 0.01
    assert error_of(Engines(number=2, speed=fit.speed), [together, together]).of_total == pytest.approx(-0.5, abs=0.01)


def test_of_an_engine_that_waits_for_a_device_times_are_fitted() -> None:
    fit = fit_speed([recorded(200, factor=4.0)])
    assert parts(fit.speed) == pytest.approx([4 * part for part in parts(SPEED)], abs=1e-3)
    assert fit.slowdown == [1.0]


def test_no_part_is_below_nought() -> None:
    steps = [
        msgspec.structs.replace(step, stats=msgspec.structs.replace(step.stats, cpu_time_s=took_s), took_s=took_s)
        for step in recorded(200)
        for took_s in [(20 - 0.1 * work_of(step.stats).num_decoding) / 1000]
    ]
    fit = fit_speed([steps])
    assert fit.speed.ms_per_seq == 0
    assert fit.speed.fixed_ms > 0


def test_too_few_steps_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match="20 steps, this has 3: record them with --steps"):
        fit_speed([recorded(3)])


def test_steps_are_read_of_folders_and_of_the_offline_engine(tmp_path: Path) -> None:
    steps = recorded(30)
    for name in ("one", "two"):
        (tmp_path / f"{name}.steps.jsonl").write_bytes(encode_steps(steps) + b'{"cut off')
    assert read_recordings([tmp_path]) == [steps, steps]
    offline = tmp_path / "offline.json"
    stats = [step.stats for step in steps]
    offline.write_bytes(msgspec.json.encode({"steps": stats[:9], "phases": [{"steps": stats[9:]}]}))
    (recording,) = read_recordings([offline])
    assert [step.stats for step in recording] == stats
    offline.write_bytes(b"steps")
    with pytest.raises(ConfigurationError, match="not an output of the offline engine"):
        read_recordings([offline])
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_recordings([tmp_path / "none"])
