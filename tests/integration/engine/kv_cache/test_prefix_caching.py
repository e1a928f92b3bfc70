"""What is found in the prefix cache of a real model changes no token, and is counted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from penstock.shared.messages.requests import EngineCoreRequest
from penstock.worker.engine.core.engine_core import EngineCore

from ..harness import VOCAB_SIZE, generate, request

BLOCK_SIZE = 4
# It preempts, evicts, and prefills in chunks of a few tokens.
CRAMPED = {
    "num_blocks": 20,
    "block_size": BLOCK_SIZE,
    "max_model_len": 80,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 8,
}


@pytest.fixture(scope="module")
def families() -> list[list[list[int]]]:
    """Per family, prompts that begin with the same 30 tokens and end in up to 9 of their own."""
    rng = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]

    beginnings = [tokens(30) for _ in range(2)]
    return [[beginning + tokens(n) for n in (0, 1, 5, 9)] for beginning in beginnings]


def num_cached_tokens(core: EngineCore, message: EngineCoreRequest) -> int:
    """Run one request to its end; what its outputs say of the cache."""
    assert core.add_request(message) is None
    said = {output.num_cached_tokens for step in steps(core) for output in step}
    (only,) = said
    return only


def steps(core: EngineCore) -> Iterator[list[Any]]:
    while core.has_work:
        yield core.step_fn()


def whose(message: EngineCoreRequest, **fields: Any) -> EngineCoreRequest:
    return msgspec.structs.replace(message, **fields)


# Full attention; full and sliding in turns, with capped logits; the same with experts.
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_same_greedy_tokens_with_and_without(
    name: str, make_core: Callable[..., EngineCore], families: list[list[list[int]]]
) -> None:
    requests = [
        request(f"{f}-{i}", prompt, max_tokens=20)
        for f, family in enumerate(families)
        for i, prompt in enumerate(family)
    ]
    expected = generate(make_core(name, enable_prefix_caching=False), requests)
    roomy, cramped = make_core(name, block_size=BLOCK_SIZE), make_core(name, **CRAMPED)
    for core in (roomy, cramped):
        for _ in range(2):
            assert generate(core, requests) == expected
    for r in requests:
        assert generate(roomy, [r])[r.request_id] == expected[r.request_id]
    stats = roomy.scheduler.stats()
    # The second time together and once alone, all but the last token of every prompt of whole blocks is there.
    num_whole = sum((len(r.prompt_token_ids or ()) - 1) // BLOCK_SIZE * BLOCK_SIZE for r in requests)
    assert stats.prefix_cache_hits >= 2 * num_whole
    assert cramped.scheduler.stats().num_preemptions > 0
    assert cramped.scheduler.stats().prefix_cache_hits > 0
    assert cramped.scheduler.block_pool.num_free == cramped.scheduler.block_pool.num_blocks


def test_prefix_hits_are_reported(make_core: Callable[..., EngineCore], families: list[list[list[int]]]) -> None:
    core = make_core("llama", block_size=BLOCK_SIZE)
    bare, _, _, longest = families[0]
    assert num_cached_tokens(core, request("first", longest)) == 0
    assert num_cached_tokens(core, request("same", longest)) == 36
    assert num_cached_tokens(core, request("bare", bare)) == 28
    assert num_cached_tokens(core, request("other", families[1][0])) == 0
    stats = core.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (39 + 39 + 30 + 30, 36 + 28)
    assert core.reset_prefix_cache()
    assert num_cached_tokens(core, request("after the reset", longest)) == 0


def test_two_tenants_share_nothing(make_core: Callable[..., EngineCore], families: list[list[list[int]]]) -> None:
    core = make_core("llama", block_size=BLOCK_SIZE)
    message = request("r", families[0][0])
    expected = generate(core, [whose(message, tenant="a")])
    for fields in ({"tenant": "b"}, {"tenant": "a", "cache_salt": "s"}):
        assert num_cached_tokens(core, whose(message, **fields)) == 0
        assert num_cached_tokens(core, whose(message, **fields)) == 28
    assert generate(core, [whose(message, tenant="b")]) == expected


def test_a_resumed_request_finds_prompt_and_output(
    make_core: Callable[..., EngineCore], families: list[list[list[int]]]
) -> None:
    core = make_core("llama", block_size=BLOCK_SIZE)
    prompt = families[0][0]
    whole = generate(core, [request("r#1", prompt)])["r#1"]
    for num_delivered in (1, 13, 29):
        resumed = request("r#2", prompt, whole[:num_delivered])
        before = core.scheduler.stats().prefix_cache_hits
        assert generate(core, [resumed])["r#2"] == whole[num_delivered:]
        found = core.scheduler.stats().prefix_cache_hits - before
        assert found == (30 + num_delivered - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert num_cached_tokens(core, resumed) == min(30, found)


def test_the_other_answers_to_a_prompt_find_it(
    make_core: Callable[..., EngineCore], families: list[list[list[int]]]
) -> None:
    core = make_core("llama", block_size=BLOCK_SIZE, max_num_batched_tokens=64)
    prompt = families[0][3]
    children = [request(str(child), prompt, temperature=1.0, seed=child) for child in range(6)]
    together = generate(core, children)
    assert len({tuple(tokens) for tokens in together.values()}) > 1
    # A step has room for one prompt and a part of another; the five that follow find all full blocks.
    assert core.scheduler.stats().prefix_cache_hits == 5 * 36
    uncached = make_core("llama", enable_prefix_caching=False)
    assert generate(uncached, children) == together
