"""One batch ahead: the same tokens as one batch at a time, under random load, by a model that reads a paged cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.errors import EngineDeadError
from penstock.shared.messages import EngineCoreRequest, FinishReason
from penstock.shared.params import SamplingParams
from penstock.worker.engine.core import EngineCore
from penstock.worker.engine.execution.batch import InputBatch
from penstock.worker.engine.executor import AcceleratorError
from penstock.worker.engine.look_ahead import LookAheadCore
from penstock.worker.engine.scheduling.batch_queue import BatchQueue
from penstock.worker.engine.scheduling.block_pool import BlockPool
from penstock.worker.engine.scheduling.ordering import FirstComeFirstServed, OrderingPolicy, Priority
from penstock.worker.engine.scheduling.prefix_cache import BlockHashCache
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.scheduling.scheduler_output import NO_TOKEN, SampledTokens, SchedulerOutput
from penstock.worker.engine.step_input import IntArray, StepInput

VOCAB_SIZE = 50
EOS = 2
MAX_MODEL_LEN = 24
BLOCK_SIZE = 4


class PagedHash:
    """An executor for a model whose next token is a hash of what the cache holds at a request's slots.

    So a wrong input, position or block shows in the tokens. What was launched is computed as late as can be.
    """

    device_memory_bytes = 0

    def __init__(self, num_blocks: int, max_num_seqs: int) -> None:
        self._batch = InputBatch(max_num_seqs, MAX_MODEL_LEN, BLOCK_SIZE)
        self._cache = np.full(num_blocks * BLOCK_SIZE, -1)
        self._launched: tuple[SchedulerOutput, StepInput] | None = None
        self.num_launched = 0
        # Which launches raise, counted from 0, and for which request every one does.
        self.failures: dict[int, Exception] = {}
        self.poison: str | None = None

    def execute(self, output: SchedulerOutput) -> SampledTokens:
        self.launch(output)
        return self.collect()

    def launch(self, output: SchedulerOutput) -> None:
        assert self._launched is None, "two batches at once"
        self._launched = output, self._batch.prepare(output)

    def collect(self) -> SampledTokens:
        assert self._launched is not None
        (output, step), self._launched = self._launched, None
        self.num_launched += 1
        failure = self.failures.get(self.num_launched - 1)
        # A request that raises alone would be ended for it.
        if isinstance(failure, AcceleratorError) or (failure is not None and len(output.requests) > 1):
            raise failure
        if self.poison in [request.request_id for request in output.requests]:
            raise RuntimeError("poison")
        self._cache[step.slot_mapping] = step.token_ids
        sampled_ids = np.array([self._token(step, index) for index in step.sampled.tolist()], np.int64)
        self._batch.append_tokens(step.sampled_rows, sampled_ids)
        token_ids = np.full(len(step.rows), NO_TOKEN)
        token_ids[step.order[step.sampled]] = sampled_ids
        return SampledTokens(token_ids.tolist())

    def _token(self, step: StepInput, index: int) -> int:
        seen = self._cache[self._slots(step, index)]
        assert (seen >= 0).all(), "a slot that nobody has written was read"
        return int((seen * (np.arange(len(seen)) % 5 + 3)).sum() * 7919 % 1009 % VOCAB_SIZE)

    def _slots(self, step: StepInput, index: int) -> IntArray:
        positions = np.arange(step.seq_lens[index])
        blocks = self._batch.block_table[step.rows[index], positions // BLOCK_SIZE]
        return blocks * BLOCK_SIZE + positions % BLOCK_SIZE


@dataclass
class Arrival:
    """A request of a load, and after which step it is aborted."""

    step: int
    prompt: list[int]
    num_delivered: int
    max_tokens: int
    abort_step: int | None
    priority: int
    ignore_eos: bool


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 12),
    prompt=st.lists(st.sampled_from([5, 6]), min_size=1, max_size=MAX_MODEL_LEN - 5),
    num_delivered=st.integers(0, 2),
    max_tokens=st.integers(3, 20),
    abort_step=st.none() | st.integers(0, 25),
    priority=st.integers(-2, 2),
    ignore_eos=st.booleans(),
)


@dataclass
class Outcome:
    """What a load came to, by request_id."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, FinishReason | None] = field(default_factory=dict)


def make_core(
    num_blocks: int = 30,
    max_num_seqs: int = 4,
    extra_budget: int = 8,
    policy: OrderingPolicy | None = None,
    *,
    is_caching: bool = False,
    is_ahead: bool = True,
) -> tuple[EngineCore, PagedHash]:
    executor, pool = PagedHash(num_blocks, max_num_seqs), BlockPool(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(
        pool,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + extra_budget,
        max_model_len=MAX_MODEL_LEN,
        policy=policy,
        prefix_cache=BlockHashCache(pool) if is_caching else None,
    )
    parts: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_token_ids": [EOS]}
    if not is_ahead:
        return EngineCore(scheduler, executor, **parts), executor
    return LookAheadCore(BatchQueue(executor), scheduler, executor, **parts), executor


def message(request_id: str, arrival: Arrival) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=arrival.prompt,
        output_token_ids=[7] * arrival.num_delivered,
        sampling_params=SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=arrival.ignore_eos),
        priority=arrival.priority,
    )


def run(core: EngineCore, load: list[Arrival]) -> Outcome:
    """Serve ``load``; the core must be in order after every step, and empty in the end."""
    outcome = Outcome({str(index): [] for index in range(len(load))})
    step = 0
    while step <= 25 or core.has_work:
        assert step < 3000, "it does not end"
        for index, arrival in enumerate(load):
            if arrival.step == step:
                assert core.add_request(message(str(index), arrival)) is None
            if arrival.abort_step == step:
                core.abort_requests([str(index)])
        if core.has_work:
            for output in core.step_fn():
                assert output.request_id not in outcome.ends, "an ended request spoke"
                outcome.tokens[output.request_id] += output.new_token_ids
                if output.finished:
                    outcome.ends[output.request_id] = output.finish_reason
        core.check_invariants()
        step += 1
    assert core.scheduler.block_pool.num_free == core.scheduler.block_pool.num_blocks
    return outcome


def alone(arrival: Arrival) -> tuple[list[int], FinishReason | None]:
    """What one request gets when it runs one batch at a time, with room enough."""
    core, _ = make_core(is_ahead=False)
    outcome = run(core, [Arrival(**{**vars(arrival), "step": 0, "abort_step": None})])
    return outcome.tokens["0"], outcome.ends["0"]


def verify(load: list[Arrival], outcome: Outcome) -> None:
    for index, arrival in enumerate(load):
        expected, reason = alone(arrival)
        found = outcome.tokens[str(index)]
        if arrival.abort_step is None:
            assert (found, outcome.ends[str(index)]) == (expected, reason)
        else:
            assert found == expected[: len(found)]


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


def arrival(**fields: object) -> Arrival:
    given: dict = {
        "step": 0,
        "prompt": [5, 6],
        "num_delivered": 0,
        "max_tokens": 6,
        "abort_step": None,
        "priority": 0,
        "ignore_eos": True,
    }
    return Arrival(**{**given, **fields})


def test_a_batch_is_launched_before_the_outputs_of_the_one_before_are_handed_over() -> None:
    core, executor = make_core()
    assert core.add_request(message("r", arrival(max_tokens=3))) is None
    tokens, _ = alone(arrival(max_tokens=3))
    assert core.step_fn() == []
    for expected in tokens[:2]:
        (output,) = core.step_fn()
        assert output.new_token_ids == [expected]
        assert executor._launched is not None
    (output,) = core.step_fn()
    assert (output.new_token_ids, output.finish_reason) == (tokens[2:], FinishReason.LENGTH)
    assert executor._launched is None, "the last token allowed was known to be the last"
    assert executor.num_launched == 3
    assert not core.has_work


def test_what_is_computed_for_an_ended_request_is_passed_over() -> None:
    core, _ = make_core()
    load = [arrival(max_tokens=20), arrival(max_tokens=20, abort_step=4), arrival(max_tokens=20, ignore_eos=False)]
    verify(load, run(core, load))


def test_a_request_that_raises_fails_alone() -> None:
    core, executor = make_core()
    executor.poison = "1"
    load = [arrival(), arrival(step=2, prompt=[6] * 9), arrival(step=1, prompt=[6, 6, 5])]
    outcome = run(core, load)
    assert outcome.ends.pop("1") is FinishReason.ERROR
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
    assert executor._launched is None
    assert core.settle() == []
    while core.has_work:
        core.step_fn()
    core.check_invariants()
