"""Several tokens of a request in a step have the same results as that many steps of one token."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.outcome import FinishReason, RequestError, TokenLogprobs
from penstock.shared.params.sampling import RepetitionDetectionParams, SamplingParams
from penstock.worker.engine.scheduling.block_pool import BlockPool
from penstock.worker.engine.scheduling.ordering import FirstComeFirstServed, OrderingPolicy, Priority
from penstock.worker.engine.scheduling.prefix_cache import BlockHashCache
from penstock.worker.engine.scheduling.request import Request
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.scheduling.scheduler_output import SampledTokens
from penstock.worker.engine.scheduling.stop import REPETITION_DETECTED

from ..paged_hash import BLOCK_SIZE, MAX_MODEL_LEN, Arrival, alone, arrival, arrivals, make_core, message, run, verify

EOS = 2
STOP = 9
PROMPT = [5, 6, 7]
# Where nothing ends it.
TOKENS = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


@given(
    load=st.lists(arrivals, max_size=8),
    num_blocks=st.integers(MAX_MODEL_LEN // BLOCK_SIZE, 20),
    max_num_seqs=st.integers(1, 5),
    extra_budget=st.integers(0, 20),
    policy=st.sampled_from([FirstComeFirstServed(), Priority()]),
    is_caching=st.booleans(),
    way=st.sampled_from(["known", "drafts", "ahead"]),
    failures=st.sets(st.integers(0, 20), max_size=4),
    seed=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_the_tokens_of_every_request_are_those_that_it_gets_alone_one_by_one(
    load: list[Arrival],
    num_blocks: int,
    max_num_seqs: int,
    extra_budget: int,
    policy: OrderingPolicy,
    is_caching: bool,
    way: str,
    failures: set[int],
    seed: int,
) -> None:
    """Whether or not the step had them as inputs, and whether or not the next step was scheduled before they came."""
    core, executor = make_core(
        num_blocks, max_num_seqs, extra_budget, policy, is_caching=is_caching, is_ahead=way == "ahead"
    )
    rng = random.Random(seed)
    executor.num_at_once = lambda request: rng.randint(1, 6)
    executor.drafts = way == "drafts"
    executor.failures = {number: RuntimeError("boom") for number in failures}
    verify(load, run(core, load))


@pytest.mark.parametrize("drafts", [False, True])
def test_accepted_inputs_are_not_computed_again_and_rejected_ones_are(drafts: bool) -> None:
    core, executor = make_core(is_ahead=False)
    executor.num_at_once, executor.drafts = lambda request: 3, drafts
    core.add_request(message("r", arrival(prompt=[5], max_tokens=20)))
    (request,) = core.scheduler._requests.values()
    counts = [(len(core.step_fn()[0].new_token_ids), request.num_tokens, request.num_computed_tokens) for _ in range(2)]
    # A block holds four tokens, so the second step has no room for a guess.
    assert counts == ([(3, 4, 3), (1, 5, 4)] if drafts else [(3, 4, 1), (3, 7, 4)])


@pytest.mark.parametrize("max_tokens", [3, 6, 9])
def test_blocks_with_tokens_after_an_end_are_no_hits(max_tokens: int) -> None:
    """The cache says so itself: who finds a block there that holds something else gets another token."""
    whole, _ = alone(arrival(prompt=[5, 6, 5], max_tokens=12))
    for num_at_once in range(1, 9):
        core, executor = make_core(is_ahead=False, is_caching=True)
        executor.num_at_once, executor.drafts = lambda request, n=num_at_once: n, True
        first, later = arrival(prompt=[5, 6, 5], max_tokens=max_tokens), arrival(step=12, prompt=[5, 6, 5, *whole])
        verify([first, later], run(core, [first, later]))
        # All that the first one knew and had computed, and no more.
        assert core.scheduler.stats().prefix_cache_hits == (3 + max_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


class Ending:
    """A grammar that ends, or fails, with a certain output token."""

    vocab_size = 50
    ending_token_ids: list[int] = []  # noqa: RUF012 - the protocol's

    def __init__(self, ends_at: int, *, fails: bool) -> None:
        self._left, self._fails = ends_at, fails
        self.is_terminated = False
        self.failure: RequestError | None = None

    @property
    def goes_on(self) -> bool:
        return not self.is_terminated and self.failure is None

    def accept(self, token_id: int) -> RequestError | None:
        self._left -= 1
        if self._left == 0:
            self.is_terminated = not self._fails
            self.failure = RequestError("failed", "it does not follow") if self._fails else None
        return self.failure

    def fill(self, bitmask: object, row: int) -> bool:
        raise NotImplementedError

    def forced_tokens(self, room: int) -> list[int]:
        raise NotImplementedError

    def fail_no_allowed_tokens(self) -> None:
        raise NotImplementedError


def with_end(token_id: int, place: int) -> list[int]:
    return [*TOKENS[: place - 1], token_id, *TOKENS[place:]]


Kind = Callable[[int], tuple[list[int], dict[str, Any], Ending | None]]
# The model's output, the request's options and the grammar, such that output token ``place``, from 1, is the last.
KINDS: dict[str, Kind] = {
    "end of sequence": lambda place: (with_end(EOS, place), {}, None),
    "stop token": lambda place: (with_end(STOP, place), {"stop_token_ids": [STOP]}, None),
    "min_tokens": lambda place: ([EOS] * 10, {"min_tokens": place}, None),
    "max_tokens": lambda place: (TOKENS, {"max_tokens": place}, None),
    "max_model_len": lambda place: (TOKENS, {"max_model_len": len(PROMPT) + place}, None),
    "repetition": lambda place: (
        [*TOKENS[: max(place - 2, 0)], *[30] * 10],
        {"repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_count=2), "min_tokens": place},
        None,
    ),
    "end of a grammar": lambda place: (TOKENS, {}, Ending(place, fails=False)),
    "end of a grammar beyond a stop token": lambda place: (with_end(EOS, place), {}, Ending(place + 2, fails=False)),
    "failure of a grammar": lambda place: (TOKENS, {}, Ending(place + 1, fails=True)),
}
REASONS = {
    "max_tokens": FinishReason.LENGTH,
    "max_model_len": FinishReason.LENGTH,
    "repetition": FinishReason.REPETITION,
    "failure of a grammar": FinishReason.ERROR,
}


def told(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -token_id / 8, 1, [(token_id, -token_id / 8)])


def serve(kind: str, place: int, num_at_once: int) -> tuple[EngineCoreOutput, Scheduler, BlockPool]:
    """Return all results of a request with this many tokens in a step."""
    script, options, grammar = KINDS[kind](place)
    pool = BlockPool(16, 2)
    scheduler = Scheduler(
        pool, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=32, prefix_cache=BlockHashCache(pool)
    )
    max_model_len = options.pop("max_model_len", 32)
    params = SamplingParams(**{"max_tokens": 40, "logprobs": 1, **options})
    request = Request("r", PROMPT, params, max_model_len=max_model_len, eos_token_ids=frozenset([EOS]))
    request.constraint = grammar
    request.prompt_logprobs = []
    scheduler.add_request(request)
    whole = EngineCoreOutput("r")
    while scheduler.has_unfinished_requests:
        step, token_ids = scheduler.schedule(), list[int]()
        for token_id in script[request.num_output_tokens :][:num_at_once]:
            token_ids.append(token_id)
            if grammar is not None:
                grammar.accept(token_id)
                if not grammar.goes_on:
                    break
        sampled = SampledTokens([token_ids], {"r": [told(token_id) for token_id in token_ids]})
        sampled.prompt_logprobs = {"r": [told(6), told(7)]} if whole.new_prompt_logprobs == [] else {}
        (output,) = scheduler.update_from_output(step, sampled)
        assert not whole.finished
        whole.new_token_ids += output.new_token_ids
        whole.new_logprobs += output.new_logprobs
        whole.new_prompt_logprobs += output.new_prompt_logprobs
        whole.finish_reason, whole.stop_reason, whole.error = output.finish_reason, output.stop_reason, output.error
        scheduler.check_invariants()
    assert request.token_ids == PROMPT + whole.new_token_ids
    return whole, scheduler, pool


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_at_once", [1, 2, 3, 4, 7])
def test_tokens_after_the_ending_token_are_dropped(kind: str, num_at_once: int) -> None:
    for place in range(1, 9):
        whole, scheduler, pool = serve(kind, place, num_at_once)
        expected, one_by_one, _ = serve(kind, place, 1)
        assert whole == expected
        assert len(whole.new_token_ids) == (max(place, 2) if kind == "repetition" else place)
        assert whole.finish_reason == REASONS.get(kind, FinishReason.STOP)
        assert whole.stop_reason == {"stop token": STOP, "repetition": REPETITION_DETECTED}.get(kind)
        assert [entry.token_id for entry in whole.new_logprobs] == whole.new_token_ids
        assert len(whole.new_prompt_logprobs) == 2
        assert pool.num_free == pool.num_blocks
        assert scheduler.stats().num_generation_tokens == one_by_one.stats().num_generation_tokens


def test_a_prompt_is_a_hit_even_if_the_grammar_failed_at_the_first_token() -> None:
    pool = BlockPool(16, 2)
    scheduler = Scheduler(
        pool, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=32, prefix_cache=BlockHashCache(pool)
    )
    failing = Request("failing", [5, 6, 7, 8], SamplingParams(), max_model_len=32)
    grammar = failing.constraint = Ending(1, fails=True)
    scheduler.add_request(failing)
    step = scheduler.schedule()
    error = grammar.accept(11)
    outputs = scheduler.update_from_output(step, SampledTokens([[11]]))
    assert outputs == [EngineCoreOutput("failing", finish_reason=FinishReason.ERROR, error=error)]
    longer = Request("longer", [5, 6, 7, 8, 9], SamplingParams(), max_model_len=32)
    scheduler.add_request(longer)
    scheduler.schedule()
    assert longer.num_computed_tokens == 4
