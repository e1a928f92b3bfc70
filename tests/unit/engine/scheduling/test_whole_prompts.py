"""The number of prompts that are computed whole in a step."""

from __future__ import annotations

import pytest

from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.scheduling.block_pool import BlockPool
from penstock.worker.engine.scheduling.chunking import WholePrompts
from penstock.worker.engine.scheduling.request import Request
from penstock.worker.engine.scheduling.scheduler import Scheduler

BUDGET = 40


@pytest.mark.parametrize(
    ("enough", "lens", "expected"),
    [
        (None, [10, 10, 10, 9, 9], [10, 10, 10, 9]),
        (20, [10, 10, 10], [10, 10]),
        (20, [10, 11, 10], [10]),
        # A prompt that is longer than enough has a step of its own, wherever it stands.
        (20, [30, 5], [30]),
        (20, [5, 30], [5]),
        (BUDGET + 10, [30, 20], [30]),
    ],
)
def test_a_step_ends_once_it_has_enough_tokens(enough: int | None, lens: list[int], expected: list[int]) -> None:
    scheduler = Scheduler(
        BlockPool(64, 4),
        max_num_seqs=8,
        max_num_batched_tokens=BUDGET,
        max_model_len=BUDGET,
        chunking=WholePrompts(enough),
    )
    for number, length in enumerate(lens):
        scheduler.add_request(
            Request(str(number), [1] * length, SamplingParams(max_tokens=1), max_model_len=BUDGET + 1)
        )
    assert scheduler.schedule().num_new_tokens == expected
