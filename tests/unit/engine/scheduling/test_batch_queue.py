"""Running one batch ahead: the same tokens as one batch at a time, under random load, by a model that reads a paged
cache.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.errors import EngineDeadError
from penstock.shared.messages.outcome import FinishReason
from penstock.worker.engine.scheduling.ordering import FirstComeFirstServed, OrderingPolicy, Priority
from penstock.worker.engine.scheduling.scheduler_output import AcceleratorError

from ..paged_hash import BLOCK_SIZE, MAX_MODEL_LEN, Arrival, alone, arrival, arrivals, make_core, message, run, verify


@given(
    load=st.lists(arrivals, max_size=8),
    num_blocks=st.integers(MAX_MODEL_LEN // BLOCK_SIZE, 20),
    max_num_seqs=st.integers(1, 5),
    extra_budget=st.integers(0, 20),
    policy=st.sampled_from([FirstComeFirstServed(), Priority()]),
    is_caching=st.booleans(),
    failures=st.sets(st.integers(0, 40), max_size=12),
)
@settings(max_examples=100, deadline=None)
def test_the_tokens_of_every_request_are_those_that_it_gets_alone(
    load: list[Arrival],
    num_blocks: int,
    max_num_seqs: int,
    extra_budget: int,
    policy: OrderingPolicy,
    is_caching: bool,
    failures: set[int],
) -> None:
    core, executor = make_core(num_blocks, max_num_seqs, extra_budget, policy, is_caching=is_caching)
    executor.failures = {number: RuntimeError("boom") for number in failures}
    verify(load, run(core, load))


def test_a_batch_is_launched_before_the_previous_outputs_are_processed() -> None:
    core, executor = make_core()
    assert core.add_request(message("r", arrival(max_tokens=3))) is None
    tokens, _ = alone(arrival(max_tokens=3))
    assert core.step_fn() == []
    for expected in tokens[:2]:
        (output,) = core.step_fn()
        assert output.new_token_ids == [expected]
        assert executor._launched
    (output,) = core.step_fn()
    assert (output.new_token_ids, output.finish_reason) == (tokens[2:], FinishReason.LENGTH)
    assert not executor._launched, "the last token allowed was known to be the last"
    assert executor.num_launched == 3
    assert not core.has_work


def test_outputs_of_an_ended_request_are_ignored() -> None:
    core, _ = make_core()
    load = [arrival(max_tokens=20), arrival(max_tokens=20, abort_step=4), arrival(max_tokens=20, ignore_eos=False)]
    verify(load, run(core, load))


def test_a_request_that_raises_fails_alone() -> None:
    core, executor = make_core()
    executor.poison = "1"
    load = [arrival(), arrival(step=2, prompt=[6] * 9), arrival(step=1, prompt=[6, 6, 5])]
    outcome = run(core, load)
    assert outcome.ends.pop("1") == (FinishReason.ERROR, None)
    for index in (0, 2):
        assert (outcome.tokens[str(index)], outcome.ends[str(index)]) == alone(load[index])


def test_a_batch_may_fail_while_the_next_is_scheduled_that_preempts_one_of_it() -> None:
    load = [arrival(prompt=[token] * 7, max_tokens=16) for token in (5, 6)]
    for number in range(16):
        core, executor = make_core(num_blocks=6)
        executor.failures = {number: RuntimeError("boom")}
        verify(load, run(core, load))
        assert core.scheduler.stats().num_preemptions > 0


def test_a_failing_accelerator_ends_a_batch_and_then_the_engine() -> None:
    core, executor = make_core()
    executor.failures = {number: AcceleratorError("lost") for number in range(1, 9)}
    core.add_request(message("a", arrival()))
    core.step_fn()
    assert [output.finish_reason for output in core.step_fn()] == [None]
    assert [output.finish_reason for output in core.step_fn()] == [FinishReason.ERROR]
    assert not core.has_work
    for request_id in "bc":
        core.add_request(message(request_id, arrival()))
        core.step_fn()
        if request_id == "c":
            with pytest.raises(EngineDeadError):
                core.step_fn()
        else:
            core.step_fn()
    core.check_invariants()


def test_settling_leaves_nothing_in_flight() -> None:
    core, executor = make_core()
    core.add_request(message("r", arrival()))
    assert core.settle() == []
    core.step_fn()
    (output,) = core.settle()
    assert output.new_token_ids == alone(arrival())[0][:1]
    assert not executor._launched
    assert core.settle() == []
    while core.has_work:
        core.step_fn()
    core.check_invariants()
