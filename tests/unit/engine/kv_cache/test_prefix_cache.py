"""Prefix caching under random load, with a model that reads every token of its context from a KV cache of tuples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.shared.process.log import configure_logging
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.scheduling.block_pool import BlockPool, InvariantError
from penstock.worker.engine.scheduling.ordering import FirstComeFirstServed, OrderingPolicy, Priority
from penstock.worker.engine.scheduling.prefix_cache import BlockHashCache, NoPrefixCache
from penstock.worker.engine.scheduling.request import Request
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput

MAX_MODEL_LEN = 28
BLOCK_SIZE = 4
VOCAB_SIZE = 1000
POLICIES = (FirstComeFirstServed(), Priority())

Keys = tuple[str | None, ...]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """A failing step is logged with its traceback, pretty by default, which takes longer than the test."""
    configure_logging("critical")


def next_token(context: tuple[int, ...]) -> int:
    """The fake model: it depends on every token so far."""
    return int.from_bytes(hashlib.md5(repr(context).encode()).digest()[:2], "big") % VOCAB_SIZE


def expected_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


class RememberingExecutor:
    """Executor that writes every token's owner and predecessors, and reads it all back before it answers.

    Attributes:
        slots: the KV cache.
        num_computed: tokens computed in all steps.
        fails_next: whether the next batch of several requests raises, after it has written.
        mistakes: all that was wrong; the core takes an exception for a failing step.
    """

    def __init__(self, num_blocks: int) -> None:
        self.slots: list[tuple[Keys, tuple[int, ...]] | None] = [None] * (num_blocks * BLOCK_SIZE)
        self.num_computed = 0
        self.executed: list[dict[str, int]] = []
        self.fails_next = False
        self.mistakes: list[str] = []
        self.device_memory_bytes = 0

    def execute(self, output: SchedulerOutput) -> SampledTokens:
        work = list(zip(output.requests, output.num_new_tokens, strict=True))
        self.executed.append({request.request_id: num_new_tokens for request, num_new_tokens in work})
        for request, num_new_tokens in work:
            begin = request.num_computed_tokens
            for position in range(begin, begin + num_new_tokens):
                slot = slot_of(request, position)
                if slot in shared_slots(request, output.requests):
                    self.mistakes.append(f"{request.request_id} wrote to a block of another request")
                self.slots[slot] = (request.extra_keys, tuple(request.token_ids[: position + 1]))
        if self.fails_next and len(work) > 1:
            self.fails_next = False
            raise RuntimeError("boom")
        self.num_computed += sum(output.num_new_tokens)
        return SampledTokens([self._answer(request, num_new_tokens) for request, num_new_tokens in work])

    def _answer(self, request: Request, num_new_tokens: int) -> list[int]:
        num_computed = request.num_computed_tokens + num_new_tokens
        for position in range(num_computed):
            expected = request.extra_keys, tuple(request.token_ids[: position + 1])
            if self.slots[slot_of(request, position)] != expected:
                self.mistakes.append(f"{request.request_id} found something else at {position}")
        return [next_token(tuple(request.token_ids))] if num_computed == request.num_tokens else []


def slot_of(request: Request, position: int) -> int:
    return request.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def shared_slots(request: Request, requests: Iterable[Request]) -> set[int]:
    blocks = {block for other in requests if other is not request for block in other.block_table}
    return {block * BLOCK_SIZE + offset for block in blocks for offset in range(BLOCK_SIZE)}


class Engine:
    """A core over the remembering executor, and the outputs of its requests."""

    def __init__(
        self,
        num_blocks: int = 40,
        *,
        max_num_seqs: int = 4,
        budget: int = 64,
        policy: OrderingPolicy | None = None,
        is_caching: bool = True,
    ) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            policy=policy,
            prefix_cache=BlockHashCache(self.pool) if is_caching else NoPrefixCache(),
        )
        self.executor = RememberingExecutor(num_blocks)
        self.core = EngineCore(self.scheduler, self.executor, vocab_size=VOCAB_SIZE, eos_token_ids=[])
        self.tokens: dict[str, list[int]] = {}
        self.num_cached_tokens: dict[str, int] = {}
        self.finished: set[str] = set()

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        delivered: list[int] | None = None,
        tenant: str = "default",
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> None:
        message = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens),
            output_token_ids=delivered,
            tenant=tenant,
            cache_salt=cache_salt,
            priority=priority,
        )
        self.tokens[request_id] = list(delivered or [])
        assert self.core.add_request(message) is None

    def step(self) -> list[EngineCoreOutput]:
        outputs = self.core.step()
        assert self.executor.mistakes == []
        self.core.check_invariants()
        for output in outputs:
            assert output.error is None
            self.tokens[output.request_id] += output.new_token_ids
            num_cached = self.num_cached_tokens.setdefault(output.request_id, output.num_cached_tokens)
            assert output.num_cached_tokens == num_cached
            if output.finished:
                self.finished.add(output.request_id)
        return outputs

    def run(self) -> None:
        while self.core.has_work:
            self.step()
        assert self.pool.num_free == self.pool.num_blocks

    def num_computed_for(self, request_id: str, prompt: list[int], **fields: object) -> int:
        """Run one request to its end; how many tokens were computed."""
        before = self.executor.num_computed
        self.add(request_id, prompt, **fields)  # type: ignore[arg-type]
        self.run()
        return self.executor.num_computed - before


@dataclass
class Arrival:
    """A request of the random load. Prompts of one family begin alike, up to ``num_common`` tokens."""

    step: int
    family: int
    num_common: int
    num_own: int
    num_delivered: int
    max_tokens: int
    abort_step: int | None
    priority: int
    tenant: str
    cache_salt: str | None

    def prompt(self, index: int) -> list[int]:
        return [self.family * 10 + i % 3 for i in range(self.num_common)] + [100 + index] * self.num_own


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 20),
    family=st.integers(0, 2),
    num_common=st.integers(1, 17),
    num_own=st.integers(0, 3),
    num_delivered=st.integers(0, 3),
    max_tokens=st.integers(4, 12),
    abort_step=st.none() | st.integers(0, 30),
    priority=st.integers(-2, 2),
    tenant=st.sampled_from(["a", "b"]),
    cache_salt=st.none() | st.just("salt"),
)


@pytest.mark.slow
@given(
    policy=st.sampled_from(POLICIES),
    load=st.lists(arrivals, min_size=1, max_size=14),
    num_blocks=st.integers(MAX_MODEL_LEN // BLOCK_SIZE, 24),
    max_num_seqs=st.integers(1, 5),
    extra_budget=st.integers(0, 30),
    failing_steps=st.sets(st.integers(0, 30), max_size=3),
    reset_steps=st.sets(st.integers(0, 40), max_size=3),
    is_caching=st.booleans() | st.just(True),
)
@settings(max_examples=250, deadline=None)
def test_every_request_gets_the_tokens_it_would_get_alone(
    policy: OrderingPolicy,
    load: list[Arrival],
    num_blocks: int,
    max_num_seqs: int,
    extra_budget: int,
    failing_steps: set[int],
    reset_steps: set[int],
    is_caching: bool,
) -> None:
    engine = Engine(
        num_blocks, max_num_seqs=max_num_seqs, budget=max_num_seqs + extra_budget, policy=policy, is_caching=is_caching
    )
    aborted: set[str] = set()
    step = 0
    while step <= 30 or engine.core.has_work:
        assert step < 2000
        for index, arrival in enumerate(load):
            if arrival.step == step:
                prompt = arrival.prompt(index)
                engine.add(
                    str(index),
                    prompt,
                    arrival.max_tokens,
                    delivered=expected_tokens(prompt, arrival.num_delivered),
                    tenant=arrival.tenant,
                    cache_salt=arrival.cache_salt,
                    priority=arrival.priority,
                )
            if arrival.abort_step == step and str(index) in engine.scheduler:
                aborted.add(str(index))
                engine.core.abort_requests([str(index)])
        engine.executor.fails_next = step in failing_steps
        if step in reset_steps:
            assert engine.core.reset_prefix_cache() == (engine.pool.usage == 0)
        if engine.core.has_work:
            engine.step()
        check_what_is_found(engine)
        step += 1
    assert engine.pool.num_free == num_blocks
    for index, arrival in enumerate(load):
        prompt = arrival.prompt(index)
        length = min(arrival.max_tokens, MAX_MODEL_LEN - len(prompt))
        tokens = engine.tokens[str(index)]
        assert tokens == expected_tokens(prompt, length)[: len(tokens)]
        assert engine.num_cached_tokens.get(str(index), 0) <= len(prompt)
        if str(index) not in aborted:
            assert len(tokens) == length
    stats = engine.scheduler.stats()
    assert 0 <= stats.prefix_cache_hits <= stats.prefix_cache_queries
    assert is_caching or stats.prefix_cache_queries == 0


def check_what_is_found(engine: Engine) -> None:
    """Check that every block that can be found holds the tokens of its hash, whichever request has written it."""
    cache = BlockHashCache(BlockPool(1, BLOCK_SIZE))
    for block_hash, block in engine.pool._block_of_hash.items():
        slots = engine.executor.slots[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
        assert slots[-1] is not None
        keys, tokens = slots[-1]
        assert slots == [(keys, tokens[: len(tokens) - BLOCK_SIZE + 1 + offset]) for offset in range(BLOCK_SIZE)]
        request = Request("r", list(tokens), SamplingParams(), max_model_len=MAX_MODEL_LEN, extra_keys=keys)
        cache._hash_blocks(request, len(tokens) // BLOCK_SIZE)
        assert request.block_hashes[-1] == block_hash


PROMPT = list(range(1, 15))  # three full blocks and two tokens


def test_the_full_blocks_of_an_earlier_prompt_are_not_computed_again() -> None:
    engine = Engine()
    assert engine.num_computed_for("first", PROMPT) == 14 + 3
    assert engine.num_computed_for("again", PROMPT) == 2 + 3
    assert engine.num_computed_for("differs early", [9, *PROMPT[1:]]) == 14 + 3
    assert engine.num_computed_for("differs late", [*PROMPT[:9], 99, *PROMPT[10:]]) == 6 + 3
    assert engine.num_cached_tokens == {"first": 0, "again": 12, "differs early": 0, "differs late": 8}
    stats = engine.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (4 * 14, 12 + 8)


def test_the_last_token_is_always_computed() -> None:
    engine = Engine()
    engine.num_computed_for("first", PROMPT[:12])
    # All three blocks are there: the third is computed again, as in vLLM.
    assert engine.num_computed_for("again", PROMPT[:12]) == 4 + 3
    assert engine.num_cached_tokens["again"] == 8
    assert engine.num_computed_for("shorter", PROMPT[:4], max_tokens=1) == 4


def test_generated_tokens_are_hits_too() -> None:
    engine = Engine()
    engine.num_computed_for("first", PROMPT, max_tokens=8)
    assert engine.tokens["first"] == expected_tokens(PROMPT, 8)
    conversation = PROMPT + engine.tokens["first"]
    # The last of its 22 tokens was never an input; 20 are in full blocks.
    assert engine.num_computed_for("next turn", [*conversation, 7], max_tokens=1) == 3
    assert engine.num_cached_tokens["next turn"] == 20


def test_a_resumed_request_finds_its_tokens_and_counts_those_of_the_prompt() -> None:
    engine = Engine()
    engine.num_computed_for("r#1", PROMPT, max_tokens=8)
    delivered = engine.tokens["r#1"][:6]
    assert engine.num_computed_for("r#2", PROMPT, max_tokens=8, delivered=delivered) == 4 + 1
    assert engine.tokens["r#2"] == expected_tokens(PROMPT, 8)
    assert engine.num_cached_tokens["r#2"] == 14
    assert engine.scheduler.stats().prefix_cache_hits == 16


def test_a_preempted_request_finds_its_own_blocks_and_counts_none() -> None:
    engine = Engine(num_blocks=7, max_num_seqs=2)
    for number in range(2):
        engine.add(str(number), [number] * 8, max_tokens=8)
    engine.run()
    assert engine.tokens == {str(number): expected_tokens([number] * 8, 8) for number in range(2)}
    assert engine.executor.num_computed == 2 * 15
    stats = engine.scheduler.stats()
    assert (stats.num_preemptions, stats.prefix_cache_queries, stats.prefix_cache_hits) == (1, 16, 0)
    assert engine.num_cached_tokens == {"0": 0, "1": 0}


@pytest.mark.parametrize(
    "other", [{"tenant": "b"}, {"cache_salt": "s"}, {"tenant": "b", "cache_salt": "s"}, {"cache_salt": ""}], ids=str
)
def test_tenants_and_salts_share_nothing(other: dict[str, str]) -> None:
    engine = Engine()
    engine.num_computed_for("first", PROMPT, tenant="a")
    assert engine.num_computed_for("other", PROMPT, **{"tenant": "a", **other}) == 14 + 3
    assert engine.num_computed_for("other again", PROMPT, **{"tenant": "a", **other}) == 2 + 3
    assert engine.num_computed_for("again", PROMPT, tenant="a") == 2 + 3


def test_requests_that_run_share_blocks() -> None:
    engine = Engine(num_blocks=9)
    engine.add("first", PROMPT, max_tokens=6)
    engine.step()
    for number in range(3):
        engine.add(str(number), PROMPT, max_tokens=6)
    engine.step()
    # 3 blocks of the prompt together, and one of each alone: 16 would be needed otherwise.
    assert engine.executor.executed[1] == {"first": 1, "0": 2, "1": 2, "2": 2}
    assert engine.pool.num_free == 9 - 3 - 4
    engine.core.abort_requests(["first"])
    engine.core.check_invariants()
    assert engine.pool.num_free == 9 - 3 - 3
    engine.run()
    assert all(engine.tokens[str(number)] == expected_tokens(PROMPT, 6) for number in range(3))


def test_a_cached_prefix_admits_a_request_that_would_not_fit() -> None:
    engine = Engine(num_blocks=7, max_num_seqs=2)
    engine.add("first", PROMPT, max_tokens=8)
    engine.step()
    engine.add("second", [*PROMPT[:12], 5], max_tokens=1)
    engine.step()
    assert "second" in engine.finished


def test_free_blocks_that_are_hit_are_not_allocated_twice() -> None:
    engine = Engine(num_blocks=7, max_num_seqs=2)
    engine.num_computed_for("first", PROMPT, max_tokens=1)
    engine.add("wide", [50] * 14, max_tokens=1)
    engine.add("again", PROMPT, max_tokens=1)
    # Free are 3 with the prompt's blocks and 4 others; "wide" takes those 4, and 1 more is not there for "again".
    engine.step()
    assert engine.executor.executed[-1] == {"wide": 14}
    engine.step()
    assert engine.executor.executed[-1] == {"again": 2}


def test_equal_prompts_that_fit_into_a_step_are_computed_and_the_next_waits_for_them() -> None:
    engine = Engine(budget=30)
    for name in "abcd":
        engine.add(name, PROMPT, max_tokens=6)
    engine.step()
    # c could compute 2 tokens now, and the other 12 next time.
    assert engine.executor.executed[-1] == {"a": 14, "b": 14}
    engine.step()
    assert engine.executor.executed[-1] == {"a": 1, "b": 1, "c": 2, "d": 2}
    engine.run()
    assert {tuple(tokens) for tokens in engine.tokens.values()} == {tuple(expected_tokens(PROMPT, 6))}


@pytest.mark.parametrize(
    ("prompt", "budget", "second"),
    [
        (PROMPT, 28, {"a": 14, "b": 14}),
        (PROMPT, 27, {"a": 14, "b": 13}),
        (PROMPT, 26, {"a": 14}),
        (PROMPT, 15, {"a": 14}),
        ([*PROMPT[:4], 99, *PROMPT[5:]], 18, {"a": 14}),
        ([*PROMPT[:4], 99, *PROMPT[5:]], 19, {"a": 14, "b": 5}),
        ([99, *PROMPT[1:]], 15, {"a": 14, "b": 1}),
    ],
    ids=[
        "it catches up",
        "a token of its own",
        "only tokens of a",
        "one token of a",
        "a's first block",
        "more than a's first block",
        "nothing in common",
    ],
)
def test_requests_that_can_compute_other_tokens_do_not_wait(
    prompt: list[int], budget: int, second: dict[str, int]
) -> None:
    engine = Engine(budget=budget)
    engine.add("a", PROMPT)
    engine.add("b", prompt)
    engine.step()
    assert engine.executor.executed == [second]
    engine.run()
    assert engine.tokens["b"] == expected_tokens(prompt, 4)


def test_blocks_that_are_already_hits_are_not_waited_for() -> None:
    engine = Engine(budget=17)
    engine.num_computed_for("first", PROMPT[:10], max_tokens=1)
    longer = [*PROMPT[:8], *range(50, 62)]
    for name in "ab":
        engine.add(name, longer, max_tokens=2)
    engine.step()
    # Both find 8 tokens; of the 12 that follow b could compute 5, which a computes.
    assert engine.executor.executed[-1] == {"a": 12}
    engine.step()
    assert engine.executor.executed[-1] == {"a": 1, "b": 4}


def test_only_whole_blocks_of_this_step_are_waited_for() -> None:
    cache = BlockHashCache(BlockPool(8, BLOCK_SIZE))
    first, second = (Request(name, PROMPT, SamplingParams(), max_model_len=MAX_MODEL_LEN) for name in "ab")
    assert cache.find(first) == cache.find(second) == []
    assert cache.is_being_computed(second, 8, [(first, 8)])
    assert not cache.is_being_computed(second, 9, [(first, 8)]), "the third block comes later"
    assert not cache.is_being_computed(second, 13, [(first, 16)]), "the last tokens are no full block"


def test_blocks_that_cannot_be_hits_are_not_waited_for() -> None:
    engine = Engine(budget=10)
    engine.add("a", PROMPT)
    engine.step()
    engine.step()
    # As when its blocks were copies of others, which have been evicted since.
    for block in engine.scheduler._running[0].block_table:
        engine.pool._forget_hash(block)
    engine.add("b", PROMPT)
    engine.step()
    assert engine.executor.executed[-1] == {"a": 1, "b": 9}


def test_a_step_that_failed_leaves_nothing_to_find() -> None:
    engine = Engine()
    engine.add("a", PROMPT)
    engine.add("b", PROMPT[:8])
    engine.executor.fails_next = True
    assert engine.step() == []
    assert engine.pool._block_of_hash == {}
    engine.run()
    assert engine.tokens["a"] == expected_tokens(PROMPT, 4)


def test_a_reset_forgets_all_without_waiting() -> None:
    engine = Engine()
    engine.add("first", PROMPT)
    assert engine.core.reset_prefix_cache(), "a request that waits holds no block"
    engine.step()
    assert not engine.core.reset_prefix_cache()
    engine.run()
    assert engine.num_computed_for("again", PROMPT) == 2 + 3
    assert engine.core.reset_prefix_cache()
    engine.core.check_invariants()
    assert engine.num_computed_for("anew", PROMPT) == 14 + 3


def test_without_caching_everything_is_computed() -> None:
    engine = Engine(is_caching=False)
    assert [engine.num_computed_for(str(number), PROMPT) for number in range(2)] == [17, 17]
    assert engine.core.reset_prefix_cache()
    assert engine.scheduler.stats().prefix_cache_queries == 0


def test_a_request_that_wants_the_logits_of_its_prompt_computes_it_and_leaves_it_to_others() -> None:
    pool = BlockPool(8, BLOCK_SIZE)
    cache = BlockHashCache(pool)
    for params, expected in ((SamplingParams(prompt_logprobs=1), 0), (SamplingParams(), 3)):
        request = Request("r", PROMPT, params, max_model_len=MAX_MODEL_LEN)
        assert len(cache.find(request)) == expected
        request.block_table, request.num_computed_tokens = pool.allocate(4), 14
        cache.record_admission(request)
        cache.record_computed(request, 14)
    assert cache.num_queried_tokens == 14


def test_a_block_with_a_wrong_hash_is_detected() -> None:
    engine = Engine()
    engine.add("a", PROMPT)
    engine.step()
    request = engine.scheduler._running[0]
    request.block_hashes[1] = request.block_hashes[0]
    with pytest.raises(InvariantError, match="wrong hash"):
        engine.core.check_invariants()


def test_prefix_caching_is_on_by_default() -> None:
    assert EngineConfig.decode(EngineConfig(model="m").encode()).enable_prefix_caching
    off = EngineConfig(model="m", enable_prefix_caching=False)
    assert not EngineConfig.decode(off.encode()).enable_prefix_caching
