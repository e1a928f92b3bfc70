"""Measured times of a model on a device."""

from __future__ import annotations

import pytest

from penstock.shared.stats import EngineStats, StepStats
from penstock.worker.keeper.costs import Costs
from penstock.worker.serving.reporting.engine_meter import EngineMeter

STEP_S, TOKEN_S = 0.02, 0.0001


def step(num_prefill_tokens: int, num_decode_tokens: int) -> StepStats:
    execute_time_s = STEP_S + TOKEN_S * (num_prefill_tokens + num_decode_tokens)
    return StepStats(
        num_prefill_tokens=num_prefill_tokens, num_decode_tokens=num_decode_tokens, execute_time_s=execute_time_s
    )


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([step(8, 3), *[step(0, 4)] * 24] * 20, id="short prompts beside decoding requests"),
        pytest.param([step(2048, 0), step(700, 1), step(0, 2), step(0, 1)], id="long prompts"),
    ],
)
def test_computing_prompts_again_takes_what_their_tokens_add_to_steps(steps: list[StepStats]) -> None:
    meter, costs = EngineMeter(), Costs()
    for each in steps:
        meter.record_step(each)
        meter.stats.prefill_time_s.observe(each.execute_time_s)
    costs.record_stats(meter.stats)
    assert costs.relost_s(1000) == pytest.approx(1000 * TOKEN_S)


def test_steps_of_one_size_measure_nothing() -> None:
    meter, costs = EngineMeter(), Costs()
    costs.record_stats(EngineStats())
    for _ in range(20):
        meter.record_step(step(16, 0))
    costs.record_stats(meter.stats)
    assert costs.relost_s(1000) == 0.0
