"""The scheduler under random load, with a model that answers from the token count alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.errors import ConfigurationError
from penstock.shared.messages import EngineCoreOutput, FinishReason, RequestError
from penstock.shared.params import SamplingParams
from penstock.worker.engine.block_pool import BlockPool, InvariantError
from penstock.worker.engine.request import Request, RequestStatus
from penstock.worker.engine.scheduler import NO_TOKEN, SampledTokens, Scheduler, SchedulerOutput

MAX_MODEL_LEN = 24


@dataclass
class Arrival:
    """A request of the random load and what will happen to it."""

    step: int
    num_prompt_tokens: int
    num_delivered: int
    max_tokens: int
    abort_step: int | None


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 20),
    num_prompt_tokens=st.integers(1, MAX_MODEL_LEN - 4),
    num_delivered=st.integers(0, 3),
    max_tokens=st.integers(4, 30),
    abort_step=st.none() | st.integers(0, 30),
)


def make_scheduler(num_blocks: int = 6, block_size: int = 4, max_num_seqs: int = 4, budget: int = 8) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=MAX_MODEL_LEN,
    )


def make_request(request_id: str, num_prompt_tokens: int, max_tokens: int = 30, num_delivered: int = 0) -> Request:
    return Request(
        request_id,
        [1] * num_prompt_tokens,
        SamplingParams(max_tokens=max_tokens),
        max_model_len=MAX_MODEL_LEN,
        output_token_ids=[100 + i for i in range(num_delivered)],
    )


def compute(output: SchedulerOutput) -> SampledTokens:
    """The fake model: output token ``i`` of any request is ``100 + i``, whatever was recomputed in between."""
    token_ids = [
        100 + request.num_output_tokens if request.num_uncomputed_tokens == num_new_tokens else NO_TOKEN
        for request, num_new_tokens in zip(output.requests, output.num_new_tokens, strict=True)
    ]
    return SampledTokens(token_ids)


@given(
    load=st.lists(arrivals, max_size=12),
    num_blocks=st.integers(MAX_MODEL_LEN // 4, 20),
    max_num_seqs=st.integers(1, 5),
    extra_budget=st.integers(0, 20),
)
@settings(max_examples=150, deadline=None)
def test_every_request_ends_within_the_rules(
    load: list[Arrival], num_blocks: int, max_num_seqs: int, extra_budget: int
) -> None:
    budget = max_num_seqs + extra_budget
    scheduler = make_scheduler(num_blocks, 4, max_num_seqs, budget)
    tokens: dict[str, list[int]] = {}
    ended: dict[str, FinishReason | None] = {}
    aborted: set[str] = set()
    step = 0
    while step <= 30 or scheduler.has_unfinished_requests:
        assert step < 3000
        for index, arrival in enumerate(load):
            if arrival.step == step:
                request = make_request(str(index), arrival.num_prompt_tokens, arrival.max_tokens, arrival.num_delivered)
                tokens[str(index)] = [100 + i for i in range(arrival.num_delivered)]
                scheduler.add_request(request)
            if arrival.abort_step == step and str(index) in scheduler:
                aborted.add(str(index))
        scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
        output = scheduler.schedule()
        scheduler.check_invariants()
        assert sum(output.num_new_tokens) <= budget
        assert len(output.requests) <= max_num_seqs
        assert all(n >= 1 for n in output.num_new_tokens)
        assert output.requests or not scheduler.has_unfinished_requests
        for new in scheduler.update_from_output(output, compute(output)):
            assert new.request_id not in ended
            tokens[new.request_id] += new.new_token_ids
            if new.finished:
                ended[new.request_id] = new.finish_reason
        scheduler.check_invariants()
        step += 1
    assert scheduler.block_pool.num_free == num_blocks
    for index, arrival in enumerate(load):
        output_ids = tokens[str(index)]
        assert output_ids == [100 + i for i in range(len(output_ids))]
        if str(index) not in aborted:
            assert ended[str(index)] == FinishReason.LENGTH
            assert len(output_ids) == min(arrival.max_tokens, MAX_MODEL_LEN - arrival.num_prompt_tokens)


def run_steps(scheduler: Scheduler, num_steps: int) -> list[SchedulerOutput]:
    outputs = []
    for _ in range(num_steps):
        output = scheduler.schedule()
        outputs.append(output)
        scheduler.update_from_output(output, compute(output))
    return outputs


def work(output: SchedulerOutput) -> dict[str, int]:
    """Request id to number of new tokens, in the scheduler's order."""
    return {r.request_id: n for r, n in zip(output.requests, output.num_new_tokens, strict=True)}


def test_a_long_prompt_is_computed_in_chunks_and_holds_up_no_decode() -> None:
    scheduler = make_scheduler(num_blocks=20)
    scheduler.add_request(make_request("short", 2))
    scheduler.add_request(make_request("long", 20))
    assert [work(output) for output in run_steps(scheduler, 4)] == [
        {"short": 2, "long": 6},
        {"short": 1, "long": 7},
        {"short": 1, "long": 7},
        {"short": 1, "long": 1},
    ]


def test_a_prefill_in_front_leaves_every_decode_behind_it_a_token() -> None:
    scheduler = make_scheduler(num_blocks=20)
    for request_id in "abc":
        scheduler.add_request(make_request(request_id, 2))
    run_steps(scheduler, 1)
    first = scheduler._running[0]
    first.num_computed_tokens, first.token_ids = 0, [1] * 20
    assert work(scheduler.schedule()) == {"a": 6, "b": 1, "c": 1}


def test_waiting_requests_are_admitted_in_order_of_arrival() -> None:
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add_request(make_request("first", 8))
    scheduler.add_request(make_request("wide", 20))
    scheduler.add_request(make_request("narrow", 1))
    assert list(work(scheduler.schedule())) == ["first"], "a narrow request does not overtake a wide one"


def test_the_last_arrived_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_blocks=6, budget=30)
    for request_id in "abc":
        scheduler.add_request(make_request(request_id, 7))
    scheduler.add_request(make_request("d", 1))
    assert list(work(run_steps(scheduler, 1)[0])) == ["a", "b", "c"]
    outputs = run_steps(scheduler, 2)
    assert list(work(outputs[1])) == ["a", "b"]
    assert outputs[1].released_ids == ["c"]
    assert [request.request_id for request in scheduler._waiting] == ["c", "d"]
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    # c computes its 7 prompt and 2 output tokens again.
    assert work(scheduler.schedule()) == {"b": 1, "c": 9}
    assert scheduler.stats().num_preemptions == 1


def test_aborting_twice_or_late_does_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 3, max_tokens=1))
    scheduler.add_request(make_request("b", 3))
    run_steps(scheduler, 1)
    for _ in range(2):
        scheduler.finish_requests(["a", "b", "unknown"], RequestStatus.FINISHED_ABORTED)
    assert not scheduler.has_unfinished_requests
    assert scheduler.schedule().released_ids == ["a", "b"]


def test_a_request_that_ends_while_its_step_runs_is_passed_over() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 3))
    scheduler.add_request(make_request("b", 3))
    output = scheduler.schedule()
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert scheduler.update_from_output(output, SampledTokens([100, 100])) == [EngineCoreOutput("b", [100])]
    scheduler.check_invariants()


def test_a_failed_step_ends_its_batch_and_no_other_request() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add_request(make_request("a", 3))
    scheduler.add_request(make_request("b", 3))
    error = RequestError("engine_step_failed", "boom", True)
    failed = scheduler.fail_batch(scheduler.schedule(), error)
    assert failed == [EngineCoreOutput("a", finish_reason=FinishReason.ERROR, error=error)]
    assert list(work(scheduler.schedule())) == ["b"]
    scheduler.check_invariants()


def test_stats_count_steps_and_tokens() -> None:
    scheduler = make_scheduler(num_blocks=20)
    scheduler.add_request(make_request("a", 10))
    scheduler.add_request(make_request("b", 10))
    run_steps(scheduler, 4)
    stats = scheduler.stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.step_counter) == (2, 0, 4)
    assert stats.num_generation_tokens == 5
    assert stats.kv_cache_usage == pytest.approx(6 / 20)


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_model_len"):
        make_scheduler(num_blocks=5)
    with pytest.raises(ConfigurationError, match="max_num_batched_tokens"):
        make_scheduler(budget=3)


def test_a_broken_state_is_found() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 3))
    run_steps(scheduler, 1)
    scheduler._running[0].block_table.pop()
    with pytest.raises(InvariantError):
        scheduler.check_invariants()


def test_importing_the_scheduler_loads_no_torch() -> None:
    code = "import sys, penstock.worker.engine.core; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
