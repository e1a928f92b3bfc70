from __future__ import annotations

from random import Random

import msgspec
import pytest

from penstock.ops.sim.fit import fit_speed
from penstock.shared.errors import ConfigurationError
from penstock.shared.stats import StepStats


def recorded(num_steps: int, fixed_ms: float, ms_per_seq: float, ms_per_prompt_token: float) -> list[StepStats]:
    random = Random(0)
    steps: list[StepStats] = []
    for _ in range(num_steps):
        decoding, reading, prompt = random.randint(1, 32), random.randint(0, 2), random.randint(10, 300)
        tokens = prompt if reading else 0
        ms = fixed_ms + ms_per_seq * decoding + ms_per_prompt_token * tokens
        steps.append(StepStats(decoding + reading, reading, tokens, decoding, 0.0, ms / 1000, 0.0))
    return steps


@pytest.mark.parametrize("where", ["workload", "phases"])
def test_a_speed_is_found_again(where: str) -> None:
    steps = recorded(200, 3.0, 0.25, 0.125)
    told = {"steps": steps} if where == "workload" else {"phases": [{"steps": steps[:99]}, {"steps": steps[99:]}]}
    fit = fit_speed(msgspec.json.encode(told))
    speed = fit.speed
    assert (speed.fixed_ms, speed.ms_per_seq, speed.ms_per_prompt_token) == pytest.approx((3.0, 0.25, 0.125), abs=1e-4)
    assert fit.num_steps == 200
    assert fit.error < 1e-4


def test_a_step_that_was_held_up_does_not_count_for_more() -> None:
    steps = recorded(200, 3.0, 0.25, 0.125)
    held_up = [msgspec.structs.replace(step, schedule_time_s=0.2) for step in steps[::10]]
    speed = fit_speed(msgspec.json.encode({"steps": steps + held_up})).speed
    assert (speed.fixed_ms, speed.ms_per_seq, speed.ms_per_prompt_token) == pytest.approx((3.0, 0.25, 0.125), abs=1e-2)


def test_no_part_is_below_nought() -> None:
    fit = fit_speed(msgspec.json.encode({"steps": recorded(200, 8.0, -0.1, 0.1)}))
    assert fit.speed.ms_per_seq == 0
    assert fit.speed.fixed_ms > 0


def test_too_few_steps_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match="20 steps, this has 3: record them with --steps"):
        fit_speed(msgspec.json.encode({"steps": recorded(3, 1, 1, 1)}))
    with pytest.raises(ConfigurationError, match="no output of the offline engine"):
        fit_speed(b"steps")
