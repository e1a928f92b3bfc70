"""A batch in flight for each stage: the same tokens as one batch at a time, by batches that share no request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.errors import EngineDeadError
from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.outcome import FinishReason
from penstock.worker.engine.control.traces import ScopedStepWatch
from penstock.worker.engine.core import engine_core
from penstock.worker.engine.core.in_flight import PipelinedCore
from penstock.worker.engine.drafting.speculation import Speculation
from penstock.worker.engine.scheduling.ordering import FirstComeFirstServed, OrderingPolicy, Priority
from penstock.worker.engine.scheduling.scheduler_output import AcceleratorError

from ..paged_hash import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Arrival,
    PagedHash,
    alone,
    arrival,
    arrivals,
    make_core,
    message,
    run,
    verify,
)


@given(
    load=st.lists(arrivals, max_size=8),
    num_blocks=st.integers(MAX_MODEL_LEN // BLOCK_SIZE, 20),
    max_num_seqs=st.integers(1, 5),
    extra_budget=st.integers(0, 20),
    policy=st.sampled_from([FirstComeFirstServed(), Priority()]),
    is_caching=st.booleans(),
    failures=st.sets(st.integers(0, 40), max_size=12),
    num_stages=st.integers(2, 4),
    drafts=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_tokens_of_every_request_are_those_that_it_gets_alone(
    load: list[Arrival],
    num_blocks: int,
    max_num_seqs: int,
    extra_budget: int,
    policy: OrderingPolicy,
    is_caching: bool,
    failures: set[int],
    num_stages: int,
    drafts: bool,
) -> None:
    core, executor = make_core(
        num_blocks,
        max_num_seqs,
        extra_budget,
        policy,
        is_caching=is_caching,
        num_stages=num_stages,
        drafting=Speculation(2, 6) if drafts else None,
    )
    executor.failures = {number: RuntimeError("boom") for number in failures}
    verify(load, run(core, load))


def make_pipeline(num_stages: int = 2, **options: Any) -> tuple[PipelinedCore, PagedHash]:
    core, executor = make_core(num_stages=num_stages, **options)
    assert isinstance(core, PipelinedCore)
    return core, executor


def in_flight(core: PipelinedCore) -> list[list[str]]:
    """Return the requests of each batch, the oldest batch first."""
    return [[request.request_id for request in batch.requests] for batch in core._stages.batches]


def add(core: PipelinedCore, *names: str, **fields: object) -> None:
    for name in names:
        assert core.add_request(message(name, arrival(**fields))) is None


def finish(core: PipelinedCore, outputs: list[EngineCoreOutput] | None = None) -> list[EngineCoreOutput]:
    outputs = [] if outputs is None else outputs
    while core.has_work:
        outputs += core.step_fn()
        core.check_invariants()
    return outputs


def test_running_requests_are_spread_over_the_stages_and_end_in_order() -> None:
    core, _ = make_pipeline(3, max_num_seqs=7)
    add(core, *"abcdefg")
    assert [core.step_fn() for _ in range(3)] == [[], [], []]
    flying = in_flight(core)
    assert sorted(map(len, flying)) == [2, 2, 3]
    for first, second in combinations(flying, 2):
        assert not set(first) & set(second)
    # The oldest lands, and continues behind the others.
    assert [output.request_id for output in core.step_fn()] == flying[0]
    assert core.step_fn() == []
    assert in_flight(core) == [*flying[1:], flying[0]]
    assert [output.request_id for output in core.step_fn()] == flying[1]
    # One that comes now joins those that are the fewest, and none waits for a stage that has nothing.
    core.settle()
    core.abort_requests(["c", "d", "e", "f", "g"])
    core.step_fn()
    core.step_fn()
    assert in_flight(core) == [["a"], ["b"]]
    add(core, "late")
    core.step_fn()
    assert in_flight(core) == [["a"], ["b"], ["late"]]


def test_the_row_of_one_that_is_aborted_in_flight_is_its_own_until_it_has_landed() -> None:
    """There are as many rows as requests that run; who takes one too early has another's token in it."""
    core, executor = make_pipeline(max_num_seqs=2)
    add(core, "a", "b", prompt=[5, 6, 5, 5], max_tokens=8)
    core.step_fn()
    core.step_fn()
    assert in_flight(core) == [["a"], ["b"]]
    core.abort_requests(["a"])
    add(core, "late", prompt=[6, 6], max_tokens=8)
    assert core.step_fn() == [], "the batch of one that has ended lands without a word"
    assert executor._batch._rows.keys() == {"a", "b"}
    outputs = finish(core)
    assert [token for output in outputs if output.request_id == "late" for token in output.new_token_ids] == (
        alone(arrival(prompt=[6, 6], max_tokens=8))[0]
    )


def test_a_request_added_again_while_in_flight_waits_for_its_batch() -> None:
    core, _ = make_pipeline()
    add(core, "a", "b", prompt=[5, 6, 5, 5], max_tokens=9)
    core.step_fn()
    core.step_fn()
    core.abort_requests(["a"])
    again = arrival(prompt=[6, 5], max_tokens=9)
    assert core.add_request(message("a", again)) is None
    core.check_invariants()
    tokens = [token for output in finish(core) if output.request_id == "a" for token in output.new_token_ids]
    assert tokens == alone(again)[0]


def test_no_request_is_preempted_in_flight() -> None:
    """Two prompts of two blocks, and six blocks in all: both want a fourth one when there is none."""
    core, _ = make_pipeline(num_blocks=6)
    add(core, "a", "b", prompt=[5] * 7, max_tokens=16)
    outputs: list[EngineCoreOutput] = []
    while core.has_work:
        flying = [request for batch in core._stages.batches for request in batch.requests]
        tables = [list(request.block_table) for request in flying]
        outputs += core.step_fn()
        still = [request for batch in core._stages.batches for request in batch.requests]
        for request, table in zip(flying, tables, strict=True):
            if request in still:
                assert request.block_table[: len(table)] == table
        core.check_invariants()
    assert core.scheduler.stats().num_preemptions > 0
    for name in "ab":
        tokens = [token for output in outputs if output.request_id == name for token in output.new_token_ids]
        assert tokens == alone(arrival(prompt=[5] * 7, max_tokens=16))[0]


def test_blocks_computed_in_flight_are_waited_for_and_shared() -> None:
    """Steps have eight tokens: the second request would compute the blocks of the first one."""
    core, _ = make_pipeline(is_caching=True, extra_budget=4)
    add(core, "a", "b", prompt=[5] * 17, max_tokens=2)
    core.step_fn()
    core.step_fn()
    finish(core)
    assert core.scheduler.stats().prefix_cache_hits == 16


@pytest.mark.parametrize("is_launching", [False, True])
def test_a_request_that_raises_fails_alone_while_others_are_in_flight(is_launching: bool) -> None:
    core, executor = make_pipeline(3)
    executor.poison, executor.is_launching_poison = "1", is_launching
    load = [arrival(prompt=[5] * length) for length in (2, 9, 3, 4)] + [arrival(step=2), arrival(step=1)]
    outcome = run(core, load)
    assert outcome.ends.pop("1") == (FinishReason.ERROR, None)
    for index in (0, 2, 3, 4, 5):
        assert (outcome.tokens[str(index)], outcome.ends[str(index)]) == alone(load[index])


def test_batches_that_fail_together_are_taken_apart_when_all_have_landed() -> None:
    core, executor = make_pipeline(max_num_seqs=4)
    executor.failures = {0: RuntimeError("boom"), 1: RuntimeError("boom")}
    load = [arrival(max_tokens=3) for _ in range(4)]
    add(core, *"abcd", max_tokens=3)
    for _ in range(2):
        core.step_fn()
    assert list(map(len, in_flight(core))) == [2, 2]
    assert core.step_fn() == []
    assert list(map(len, in_flight(core))) == [2], "nothing is launched before the isolation"
    assert core.step_fn() == []
    assert [[output.request_id for output in core.step_fn()] for _ in range(4)] == [["a"], ["b"], ["c"], ["d"]]
    expected, _ = alone(load[0])
    for name in "abcd":
        tokens = core.scheduler._requests[name].token_ids[2:]
        assert tokens == expected[:1]
    finish(core)


def test_a_failing_accelerator_ends_batches_and_then_the_engine() -> None:
    core, executor = make_pipeline(max_num_seqs=4)
    executor.failures = {number: AcceleratorError("lost") for number in range(3)}
    add(core, *"abcdef")
    ended: list[EngineCoreOutput] = []
    with pytest.raises(EngineDeadError):
        finish(core, ended)
    assert [(output.request_id, output.finish_reason) for output in ended] == [
        (name, FinishReason.ERROR) for name in "abcd"
    ]


def test_settling_leaves_nothing_in_flight() -> None:
    core, executor = make_pipeline()
    assert core.settle() == []
    add(core, "a", "b")
    core.step_fn()
    core.step_fn()
    assert [output.request_id for output in core.settle()] == ["a", "b"]
    assert in_flight(core) == []
    assert not executor._launched
    core.check_invariants()
    assert core.settle() == []
    finish(core)


def test_the_times_of_batches_that_overlap_add_up_to_that_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = count()
    monkeypatch.setattr(engine_core, "time", SimpleNamespace(perf_counter=lambda: next(moments), thread_time=lambda: 0))
    core, _ = make_pipeline()
    add(core, "a", "b", max_tokens=4)
    events = []
    while core.has_work:
        core.step_fn()
        events.append(core.take_step_stats())
    times = [
        (stats.schedule_time_s, stats.execute_time_s, stats.update_time_s) for stats in events if stats is not None
    ]
    # Tokens computed for another request during its pause are not counted.
    assert times == [(1, 2, 1)] * 8


def test_a_profile_shows_both_parts_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scopes of torch end in the reverse order of their beginnings, so none is open while another batch is computed."""
    opened: list[str] = []
    counts: Counter[str] = Counter()

    @contextmanager
    def scope(name: str, what: str | None) -> Iterator[None]:
        assert not opened, f"{name} inside of {opened}"
        opened.append(name)
        yield
        counts[opened.pop()] += 1

    monkeypatch.setattr("torch.profiler.record_function", scope)
    core, _ = make_pipeline()
    core.step_watch = ScopedStepWatch
    add(core, "a", "b", max_tokens=2)
    finish(core)
    assert (counts["engine: execute"], counts["engine: update"]) == (8, 4)
