"""A model whose tokens show the content of a paged cache, cores over it, and loads for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from penstock.shared.messages.outcome import FinishReason, TokenLogprobs
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.core.in_flight import LookaheadCore, PipelinedCore
from penstock.worker.engine.core.step_input import IntArray, StepInput
from penstock.worker.engine.execution.batch import InputBatch
from penstock.worker.engine.execution.model_runner import Verification
from penstock.worker.engine.scheduling.batches import BatchQueue, StagedBatches
from penstock.worker.engine.scheduling.block_pool import BlockPool
from penstock.worker.engine.scheduling.drafting import Drafting
from penstock.worker.engine.scheduling.ordering import OrderingPolicy
from penstock.worker.engine.scheduling.prefix_cache import BlockHashCache
from penstock.worker.engine.scheduling.request import Request
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.scheduling.scheduler_output import AcceleratorError, SampledTokens, SchedulerOutput

VOCAB_SIZE = 50
EOS = 2
MAX_MODEL_LEN = 24
BLOCK_SIZE = 4
# In the cache, nothing that a model may read.
WRONG_DRAFT = -7


class PagedHash:
    """An executor for a model whose next token is a hash of the cache at a request's slots.

    So a wrong input, position or block shows in the tokens. Launched steps are computed as late as can be.

    ``num_at_once`` says how many tokens a request gets in a step. With ``drafts`` all but the last of them were inputs
    of the step, as drafts that came true, and then one that did not where there is room for it. Guesses that the
    scheduler gives are verified as a ``ModelRunner`` does.
    """

    device_memory_bytes = 0
    feeds_next = False

    def __init__(self, num_blocks: int, max_num_seqs: int, num_stages: int = 1) -> None:
        self._num_stages = num_stages
        self._batch = InputBatch(max_num_seqs, MAX_MODEL_LEN, BLOCK_SIZE)
        self._cache = np.full(num_blocks * BLOCK_SIZE, -1)
        self._launched: deque[tuple[SchedulerOutput, StepInput]] = deque()
        self.num_launched = 0
        # Which launches raise, counted from 0, and for which request every one does.
        self.failures: dict[int, Exception] = {}
        self.is_launching_poison = False
        self.poison: str | None = None
        self.num_at_once: Callable[[Request], int] = lambda request: 1
        self.drafts = False

    def execute(self, output: SchedulerOutput) -> SampledTokens:
        self.launch(output)
        return self.collect()

    def launch(self, output: SchedulerOutput) -> None:
        assert len(self._launched) < self._num_stages, "too many batches at once"
        names = [request.request_id for request in output.requests]
        assert not any(request.request_id in names for batch, _ in self._launched for request in batch.requests)
        step = self._batch.prepare(output)
        if self.is_launching_poison and self.poison in names:
            raise RuntimeError("poison")
        self._launched.append((output, step))

    def discard(self) -> None:
        raise AssertionError("no batch is launched before the tokens of the one before are read")

    def collect(self) -> SampledTokens:
        output, step = self._launched.popleft()
        self.num_launched += 1
        failure = self.failures.get(self.num_launched - 1)
        # A request that raises alone would be ended for it.
        if isinstance(failure, AcceleratorError) or (failure is not None and len(output.requests) > 1):
            raise failure
        if self.poison in [request.request_id for request in output.requests]:
            raise RuntimeError("poison")
        self._store(step)
        token_ids: list[list[int]] = [[] for _ in output.requests]
        for index, num_known in zip(step.sampled.tolist(), step.num_known_tokens.tolist(), strict=True):
            token_ids[step.order[index]] = self._tokens(output, step, index, num_known)
        work = zip(output.requests, token_ids, strict=True)
        logprobs = {r.request_id: [judged(t) for t in tokens] for r, tokens in work if tokens}
        sampled = SampledTokens(token_ids, logprobs)
        if step.num_drafts is not None:
            self._verify(output, step, sampled)
        return sampled

    def _store(self, step: StepInput) -> None:
        self._cache[step.slot_mapping] = step.token_ids

    def _verify(self, output: SchedulerOutput, step: StepInput, sampled: SampledTokens) -> None:
        verification = Verification(step, output.requests, sampled)
        while len(wave := verification.next_wave()):
            rows, num_tokens = verification.rows_of(wave)
            hashes = [
                self._token(step, index, count, [])
                for index, count in zip(step.sampled[wave].tolist(), num_tokens.tolist(), strict=True)
            ]
            # Behind the guess that came true, there are the logits of the next token.
            assert (step.positions[step.logit_rows[verification.logits_of(wave)]] == num_tokens - 1).all()
            self._batch.append_tokens(rows, np.array(hashes))
            verification.add_wave(
                wave, np.array(hashes), {place: judged(hashes[place]) for place in range(len(hashes))}
            )

    def _tokens(self, output: SchedulerOutput, step: StepInput, index: int, num_known: int) -> list[int]:
        """The tokens of one request: as many as ``num_at_once`` says, whether or not one of them ends it."""
        place = step.order[index]
        request = output.requests[place]
        num_tokens, room = self.num_at_once(request), len(request.block_table) * BLOCK_SIZE - num_known
        if self.drafts:
            num_tokens = min(num_tokens, room + 1)
        tokens: list[int] = []
        for _ in range(num_tokens):
            tokens.append(self._token(step, index, num_known, tokens))
            self._batch.append_tokens(step.rows[index : index + 1], np.array(tokens[-1:]))
        if self.drafts:
            inputs = [*tokens[:-1], WRONG_DRAFT][:room]
            positions = np.arange(num_known, num_known + len(inputs))
            self._cache[self._slots(step, index, positions)] = inputs
            output.num_new_tokens[place] += len(inputs)
        return tokens

    def _token(self, step: StepInput, index: int, num_known: int, following: list[int]) -> int:
        context = np.append(self._cache[self._slots(step, index, np.arange(num_known))], following)
        assert (context >= 0).all(), "a slot that nobody has written was read"
        return int((context * (np.arange(len(context)) % 5 + 3)).sum() * 7919 % 1009 % VOCAB_SIZE)

    def _slots(self, step: StepInput, index: int, positions: IntArray) -> IntArray:
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
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 12),
    prompt=st.lists(st.sampled_from([5, 6]), min_size=1, max_size=MAX_MODEL_LEN - 5),
    num_delivered=st.integers(0, 2),
    max_tokens=st.integers(3, 20),
    abort_step=st.none() | st.integers(0, 25),
    priority=st.integers(-2, 2),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.none() | st.just([*range(10, 16)]),
)


End = tuple[FinishReason | None, int | str | None]


def judged(token_id: int) -> TokenLogprobs:
    """Return the logprobs of a token."""
    return TokenLogprobs(token_id, -token_id / 8, 1, [])


@dataclass
class Outcome:
    """The results of a load, by request_id."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, End] = field(default_factory=dict)


def make_core(
    num_blocks: int = 30,
    max_num_seqs: int = 4,
    extra_budget: int = 8,
    policy: OrderingPolicy | None = None,
    *,
    is_caching: bool = False,
    is_ahead: bool = True,
    drafting: Drafting | None = None,
    num_stages: int = 1,
) -> tuple[EngineCore, PagedHash]:
    executor, pool = PagedHash(num_blocks, max_num_seqs, num_stages), BlockPool(num_blocks, BLOCK_SIZE)
    stages = StagedBatches(executor, num_stages) if num_stages > 1 else None
    scheduler = Scheduler(
        pool,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + extra_budget,
        max_model_len=MAX_MODEL_LEN,
        policy=policy,
        prefix_cache=BlockHashCache(pool) if is_caching else None,
        drafting=drafting,
        flights=stages,
    )
    parts: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_token_ids": [EOS]}
    if stages is not None:
        return PipelinedCore(stages, scheduler, executor, **parts), executor
    if not is_ahead:
        return EngineCore(scheduler, executor, **parts), executor
    return LookaheadCore(BatchQueue(executor), scheduler, executor, **parts), executor


def message(request_id: str, arrival: Arrival) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=arrival.prompt,
        output_token_ids=[7] * arrival.num_delivered,
        sampling_params=SamplingParams(
            max_tokens=arrival.max_tokens,
            min_tokens=arrival.min_tokens,
            ignore_eos=arrival.ignore_eos,
            stop_token_ids=arrival.stop_token_ids,
        ),
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
                assert output.new_logprobs == [judged(token_id) for token_id in output.new_token_ids]
                if output.finished:
                    outcome.ends[output.request_id] = output.finish_reason, output.stop_reason
        core.check_invariants()
        step += 1
    assert core.scheduler.block_pool.num_free == core.scheduler.block_pool.num_blocks
    assert core.scheduler.stats().num_generation_tokens == sum(map(len, outcome.tokens.values()))
    return outcome


def alone(arrival: Arrival) -> tuple[list[int], End]:
    """Return the tokens of one request that runs one batch at a time, with room enough."""
    core, _ = make_core(is_ahead=False)
    outcome = run(core, [Arrival(**{**vars(arrival), "step": 0, "abort_step": None})])
    return outcome.tokens["0"], outcome.ends["0"]


def verify(load: list[Arrival], outcome: Outcome) -> None:
    for index, arrival in enumerate(load):
        expected, reason = alone(arrival)
        tokens = outcome.tokens[str(index)]
        if arrival.abort_step is None:
            assert (tokens, outcome.ends[str(index)]) == (expected, reason)
        else:
            assert tokens == expected[: len(tokens)]


def arrival(**fields: object) -> Arrival:
    options: dict = {
        "step": 0,
        "prompt": [5, 6],
        "num_delivered": 0,
        "max_tokens": 6,
        "abort_step": None,
        "priority": 0,
        "ignore_eos": True,
    }
    return Arrival(**{**options, **fields})
