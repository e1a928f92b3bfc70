"""The cost of drafts to a request: a bound that holds for any text, and the right drafts that earn more of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.drafting.speculation import FULL, REFILL, Allowance, NoMemory, Speculation
from penstock.worker.engine.scheduling.block_pool import BlockPool
from penstock.worker.engine.scheduling.block_tables import SingleBlockTable
from penstock.worker.engine.scheduling.drafting import STEP_COST
from penstock.worker.engine.scheduling.request import Request
from penstock.worker.engine.scheduling.scheduler_output import SchedulerOutput

from .always import Always


class Decoding:
    """A request that decodes, step by step, with ``drafter``; ``others`` are rows of others in a step."""

    def __init__(self, num_blocks: int = 100) -> None:
        self.drafter = Always()
        self.speculation = Speculation(15, 6, NoMemory(self.drafter))
        self.tables = SingleBlockTable(BlockPool(num_blocks, 16))
        self.request = Request("r", [5] * 15, SamplingParams(max_tokens=1000), max_model_len=1100)
        self.request.num_computed_tokens = 14
        self.tables.grow(self.request, 15)
        self.other = Request("other", [5] * 50, SamplingParams(), max_model_len=1100)

    def step(self, num_right: int = 0, others: int = 0) -> int:
        """Compute a step in which this many drafts come true; return the number of drafts."""
        output = SchedulerOutput()
        self.tables.grow(self.request, self.request.num_tokens)
        output.add(self.request, 1)
        if others:
            output.add(self.other, others)
        self.speculation.extend(output, self.tables)
        num_drafts = len(output.drafts.get(0, ()))
        num_right = min(num_right, num_drafts)
        self.request.token_ids += [5] * (num_right + 1)
        self.request.num_computed_tokens += num_right + 1
        if num_drafts:
            self.speculation.record_accepted(self.request, num_drafts, num_right)
        return num_drafts


@pytest.mark.parametrize("num_tokens", [100, 200, 400, 800])
def test_unpredictable_text_takes_at_most_two_percent_longer(num_tokens: int) -> None:
    decoding = Decoding()
    num_steps_with_drafts = sum(decoding.step() > 0 for _ in range(num_tokens))
    assert num_steps_with_drafts
    assert num_steps_with_drafts * STEP_COST <= 0.02 * num_tokens


@given(rights=st.lists(st.integers(0, 3), min_size=1, max_size=300))
@settings(max_examples=50, deadline=None)
def test_no_text_loses_more_than_the_allowance(rights: list[int]) -> None:
    """The loss counts in steps: the longer time of steps with drafts, less the steps saved by right drafts."""
    decoding = Decoding()
    cost, num_before = 0.0, decoding.request.num_tokens
    for num_right in rights:
        num_tokens = decoding.request.num_tokens
        if decoding.step(num_right):
            cost += STEP_COST - (decoding.request.num_tokens - num_tokens - 1)
    assert cost <= FULL + REFILL * (decoding.request.num_tokens - num_before)


def test_accepted_drafts_raise_the_allowance_and_rejected_ones_lower_it() -> None:
    decoding = Decoding()
    assert [decoding.step(num_right) for num_right in (2, 4, 5, 1, 0, 0, 0)] == [2, 4, 5, 5, 2, 1, 1]


def test_a_failed_draft_still_counts_when_others_use_the_next_steps() -> None:
    decoding = Decoding()
    assert [decoding.step() for _ in range(2)] == [2, 1]
    assert [decoding.step(others=9) for _ in range(3)] == [0, 0, 0]
    assert [decoding.step() for _ in range(3)] == [1, 1, 0]


def test_a_request_without_allowance_drafts_nothing() -> None:
    decoding = Decoding()
    for _ in range(20):
        decoding.step()
    assert decoding.drafter.rooms == [2, 1, 1, 1]


def test_drafts_without_a_cache_slot_cost_nothing() -> None:
    decoding = Decoding(num_blocks=1)
    decoding.request.token_ids.append(5)
    decoding.request.num_computed_tokens += 1
    for _ in range(8):
        output = SchedulerOutput()
        output.add(decoding.request, 1)
        decoding.speculation.extend(output, decoding.tables)
        assert not output.drafts
    assert decoding.drafter.rooms == [2] * 8


def test_drafts_are_limited_by_the_option() -> None:
    allowance = Allowance(1, 10)
    assert allowance.room(10) == 1
    allowance.judge(1, 1)
    assert allowance.room(12) == 1
