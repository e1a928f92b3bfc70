"""The scheduler under random load, with a model that answers from the token count alone."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.errors import ConfigurationError
from penstock.shared.messages.core import EngineCoreEventType, EngineCoreOutput
from penstock.shared.messages.outcome import FinishReason, RequestError
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.scheduling.block_pool import BlockPool, InvariantError
from penstock.worker.engine.scheduling.ordering import FirstComeFirstServed, OrderingPolicy, Priority
from penstock.worker.engine.scheduling.prefix_cache import BlockHashCache
from penstock.worker.engine.scheduling.request import ClockedTimeline, Request, RequestStatus, Timeline
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput

MAX_MODEL_LEN = 24
POLICIES = (FirstComeFirstServed(), Priority())


@dataclass
class Arrival:
    """A request of the random load and its future."""

    step: int
    num_prompt_tokens: int
    num_delivered: int
    max_tokens: int
    abort_step: int | None
    priority: int


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 20),
    num_prompt_tokens=st.integers(1, MAX_MODEL_LEN - 4),
    num_delivered=st.integers(0, 3),
    max_tokens=st.integers(4, 30),
    abort_step=st.none() | st.integers(0, 30),
    priority=st.integers(-2, 2),
)


def make_scheduler(
    num_blocks: int = 6,
    block_size: int = 4,
    max_num_seqs: int = 4,
    budget: int = 8,
    policy: OrderingPolicy | None = None,
    *,
    is_caching: bool = False,
    timeline: Timeline | None = None,
) -> Scheduler:
    pool = BlockPool(num_blocks, block_size)
    return Scheduler(
        pool,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=MAX_MODEL_LEN,
        policy=policy,
        prefix_cache=BlockHashCache(pool) if is_caching else None,
        timeline=timeline,
    )


def make_request(
    request_id: str, num_prompt_tokens: int, max_tokens: int = 30, num_delivered: int = 0, priority: int = 0
) -> Request:
    return Request(
        request_id,
        [1] * num_prompt_tokens,
        SamplingParams(max_tokens=max_tokens),
        max_model_len=MAX_MODEL_LEN,
        output_token_ids=[100 + i for i in range(num_delivered)],
        priority=priority,
    )


def compute(output: SchedulerOutput) -> SampledTokens:
    """The fake model: output token ``i`` of any request is ``100 + i``, whatever was recomputed in between."""
    token_ids = [
        [100 + request.num_output_tokens] if request.num_uncomputed_tokens == num_new_tokens else []
        for request, num_new_tokens in zip(output.requests, output.num_new_tokens, strict=True)
    ]
    return SampledTokens(token_ids)


def schedule_checked(scheduler: Scheduler, policy: OrderingPolicy) -> SchedulerOutput:
    """Schedule a step, and verify who got work, who was admitted and who was preempted."""
    before = list(scheduler._running)
    output = scheduler.schedule()
    scheduler.check_invariants()
    running, waiting = list(scheduler._running), list(scheduler._waiting)
    # A preempted request may be admitted again at once: another one holds its blocks, too.
    stayed = [r for r in before if r in running and r.request_id not in output.released_ids]
    assert output.requests == stayed + [r for r in output.requests if r not in stayed]
    assert sorted(output.requests, key=policy.key) == running, "whoever runs has work, and nobody else"
    for request, num_new_tokens in zip(output.requests, output.num_new_tokens, strict=True):
        num_blocks = scheduler.block_pool.blocks_for(request.num_computed_tokens + num_new_tokens)
        assert len(request.block_table) >= num_blocks, "work without blocks"
    next_key = policy.key(waiting[0]) if waiting else None
    victims = [request for request in before if request in waiting]
    for request in running:
        if request not in before:
            assert next_key is None or policy.key(request) < next_key, "one who waits was overtaken"
        else:
            assert all(policy.key(request) < policy.key(victim) for victim in victims), "the wrong one was preempted"
    return output


@given(
    policy=st.sampled_from(POLICIES),
    load=st.lists(arrivals, max_size=12),
    num_blocks=st.integers(MAX_MODEL_LEN // 4, 20),
    max_num_seqs=st.integers(1, 5),
    extra_budget=st.integers(0, 20),
    is_caching=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_every_request_ends_within_the_rules(
    policy: OrderingPolicy,
    load: list[Arrival],
    num_blocks: int,
    max_num_seqs: int,
    extra_budget: int,
    is_caching: bool,
) -> None:
    budget = max_num_seqs + extra_budget
    scheduler = make_scheduler(num_blocks, 4, max_num_seqs, budget, policy, is_caching=is_caching)
    tokens: dict[str, list[int]] = {}
    ended: dict[str, FinishReason | None] = {}
    aborted: set[str] = set()
    step = 0
    while step <= 30 or scheduler.has_unfinished_requests:
        assert step < 3000
        for index, arrival in enumerate(load):
            if arrival.step == step:
                request = make_request(
                    str(index),
                    arrival.num_prompt_tokens,
                    arrival.max_tokens,
                    arrival.num_delivered,
                    arrival.priority,
                )
                tokens[str(index)] = [100 + i for i in range(arrival.num_delivered)]
                scheduler.add_request(request)
            if arrival.abort_step == step and str(index) in scheduler:
                aborted.add(str(index))
        scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
        output = schedule_checked(scheduler, policy)
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


def test_the_last_arrived_is_preempted_and_resumed_first() -> None:
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


def test_the_next_output_has_the_events_and_their_times() -> None:
    clock = itertools.count()
    scheduler = make_scheduler(num_blocks=6, budget=30, timeline=ClockedTimeline(lambda: next(clock)))
    for request_id in "abc":
        scheduler.add_request(make_request(request_id, 7))
    events = []
    for _ in range(5):
        step = scheduler.schedule()
        outputs = scheduler.update_from_output(step, SampledTokens([[100] for _ in step.requests]))
        events.append({o.request_id: [(e.type, e.timestamp) for e in o.events] for o in outputs})
        if len(events) == 3:
            scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    queued, scheduled, preempted = EngineCoreEventType
    assert events[0] == {id: [(queued, n), (scheduled, n + 3)] for n, id in enumerate("abc")}
    assert events[1] == {"a": [], "b": [], "c": []}
    assert events[2] == {"a": [], "b": []}
    assert events[3]["c"] == [(preempted, 6), (scheduled, 7)]
    assert events[4]["c"] == []


def test_with_priorities_the_lowest_goes_first_and_equals_go_by_arrival() -> None:
    scheduler = make_scheduler(num_blocks=20, max_num_seqs=5, policy=Priority())
    for request_id, priority in {"a": 1, "b": 0, "c": 1, "d": -1, "e": 0}.items():
        scheduler.add_request(make_request(request_id, 1, priority=priority))
    assert list(work(scheduler.schedule())) == ["d", "b", "e", "a", "c"]


def test_without_the_priority_policy_the_number_is_ignored() -> None:
    scheduler = make_scheduler(num_blocks=20)
    scheduler.add_request(make_request("a", 1, priority=1))
    scheduler.add_request(make_request("b", 1, priority=-1))
    assert list(work(scheduler.schedule())) == ["a", "b"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_of_a_dead_engine_is_ordered_by_its_arrival(policy: OrderingPolicy) -> None:
    scheduler = make_scheduler(num_blocks=20, policy=policy)
    scheduler.add_request(make_request("a", 2))
    scheduler.add_request(make_request("resumed", 2, num_delivered=2))
    scheduler.add_request(make_request("b", 2))
    assert work(scheduler.schedule()) == {"a": 2, "resumed": 4, "b": 2}


def test_the_highest_number_is_preempted_though_it_was_there_first() -> None:
    scheduler = make_scheduler(num_blocks=6, budget=30, policy=Priority())
    scheduler.add_request(make_request("low", 7, priority=5))
    run_steps(scheduler, 1)
    scheduler.add_request(make_request("high", 7, priority=0))
    scheduler.add_request(make_request("middle", 7, priority=1))
    outputs = run_steps(scheduler, 2)
    # low needs a block, has been admitted first, and is itself the one that goes last.
    assert [work(output) for output in outputs] == [{"low": 1, "high": 7, "middle": 7}, {"high": 1, "middle": 1}]
    assert outputs[1].released_ids == ["low"]
    # high and middle need one each; both are in the blocks that low had.
    assert work(scheduler.schedule()) == {"high": 1, "middle": 1}
    assert scheduler.block_pool.num_free == 0
    scheduler.check_invariants()


def test_among_equals_the_last_arrived_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=6, budget=30, policy=Priority())
    for request_id in "abc":
        scheduler.add_request(make_request(request_id, 7, priority=1))
    assert list(work(run_steps(scheduler, 3)[2])) == ["a", "b"]


def test_a_preempted_request_has_no_work_in_the_step_though_it_was_admitted_before() -> None:
    scheduler = make_scheduler(num_blocks=6, budget=30, policy=Priority())
    scheduler.add_request(make_request("low", 9, priority=5))
    run_steps(scheduler, 1)
    scheduler.add_request(make_request("high", 11, priority=0))
    run_steps(scheduler, 2)
    # high goes from 12 to 13 tokens; low has room in its third block until then, and would have been visited before.
    assert work(scheduler.schedule()) == {"high": 1}
    assert [request.request_id for request in scheduler._waiting] == ["low"]
    scheduler.check_invariants()


def test_a_waiting_request_preempts_no_other() -> None:
    full = make_scheduler(num_blocks=20, max_num_seqs=1, policy=Priority())
    short = make_scheduler(num_blocks=6, policy=Priority())
    for scheduler in (full, short):
        scheduler.add_request(make_request("low", 8, priority=5))
        run_steps(scheduler, 1)
        scheduler.add_request(make_request("high", 20, priority=0))
        assert list(work(run_steps(scheduler, 1)[0])) == ["low"]
        assert scheduler.stats().num_preemptions == 0
        scheduler.finish_requests(["low"], RequestStatus.FINISHED_ABORTED)
        assert list(work(scheduler.schedule())) == ["high"]


def test_the_blocks_of_a_preempted_request_go_to_those_before_it() -> None:
    scheduler = make_scheduler(num_blocks=8, budget=40, policy=Priority())
    scheduler.add_request(make_request("high", 8, priority=0))
    scheduler.add_request(make_request("low", 21, priority=5))
    run_steps(scheduler, 1)
    scheduler.add_request(make_request("middle", 20, priority=1))
    assert work(scheduler.schedule()) == {"high": 1, "middle": 20}
    assert [request.request_id for request in scheduler._waiting] == ["low"]
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
    assert scheduler.update_from_output(output, SampledTokens([[100], [100]])) == [EngineCoreOutput("b", [100])]
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


def test_a_broken_state_is_detected() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 3))
    run_steps(scheduler, 1)
    scheduler._running[0].block_table.pop()
    with pytest.raises(InvariantError):
        scheduler.check_invariants()


def test_a_changed_priority_is_detected() -> None:
    scheduler = make_scheduler(policy=Priority())
    for request_id in "ab":
        scheduler.add_request(make_request(request_id, 3))
    scheduler.check_invariants()
    scheduler._waiting[0].priority = 1
    with pytest.raises(InvariantError, match="order"):
        scheduler.check_invariants()


def test_importing_the_scheduler_loads_no_torch() -> None:
    code = "import sys, penstock.worker.engine.core.engine_core; print('torch' in sys.modules, 'numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
