"""Requests whose beginnings are read: they get the same tokens as without, and no other request waits for a disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.core.in_flight import LookaheadCore
from penstock.worker.engine.offload.blocks import HostBlocks, make_device_blocks
from penstock.worker.engine.offload.folder_tier import Row
from penstock.worker.engine.offload.offload import KVOffload
from penstock.worker.engine.offload.request_loads import OffloadLoads
from penstock.worker.engine.offload.tiers import MemoryTier, Tiers
from penstock.worker.engine.offload.transfers import Loader, OffloadingPrefixCache, WriteBehind
from penstock.worker.engine.scheduling.batches import BatchQueue
from penstock.worker.engine.scheduling.block_pool import BlockPool
from penstock.worker.engine.scheduling.scheduler import Scheduler

from ....processes import DEADLINE_S
from ..paged_hash import BLOCK_SIZE, EOS, MAX_MODEL_LEN, VOCAB_SIZE, Arrival, PagedHash, arrivals, run, verify

BLOCK_BYTES = BLOCK_SIZE * 8
IDENTITY = b"\1" * 32
PROMPT = [5, 6, 5, 5, 6, 6, 5, 6, 6, 6, 5, 5, 6, 5]


class GatedTiers(Tiers):
    """Reads wait at ``gate``, which is open at first."""

    def __init__(self, memory: MemoryTier | None) -> None:
        super().__init__(memory, None)
        self.gate = threading.Event()
        self.gate.set()
        self.is_reached = threading.Event()

    def read(self, block_hash: bytes, out: Row) -> bool:
        self.is_reached.set()
        assert self.gate.wait(DEADLINE_S)
        return super().read(block_hash, out)


class Made:
    """A core whose blocks are kept in memory outside its cache."""

    def __init__(
        self, memory: MemoryTier | None = None, num_blocks: int = 30, max_num_seqs: int = 4, *, is_ahead: bool = False
    ) -> None:
        self.cached: dict[str, int] = {}
        self.memory = memory or MemoryTier(1000 * BLOCK_BYTES, BLOCK_BYTES)
        self.executor, self.pool = PagedHash(num_blocks, max_num_seqs), BlockPool(num_blocks, BLOCK_SIZE)
        cache = torch.from_numpy(self.executor._cache).view(num_blocks, BLOCK_SIZE)
        self.tiers = GatedTiers(self.memory)
        # As an engine that comes after another one: the memory stays the same.
        self.tiers._identity = IDENTITY
        write_behind = WriteBehind(self.tiers, HostBlocks(lambda: [cache]), self.pool)
        loader = Loader(self.tiers, HostBlocks(lambda: [cache]))
        self.offload = KVOffload(self.tiers, write_behind, loader, lambda: IDENTITY)
        prefix_cache = OffloadingPrefixCache(self.pool, write_behind)
        self.loads = OffloadLoads(self.offload, int(is_ahead), self.pool, prefix_cache, max_num_seqs)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + 8,
            max_model_len=MAX_MODEL_LEN,
            prefix_cache=prefix_cache,
            loads=self.loads,
        )
        parts: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_token_ids": [EOS]}
        make = EngineCore if not is_ahead else lambda *a, **k: LookaheadCore(BatchQueue(self.executor), *a, **k)
        self.core = make(self.scheduler, self.executor, **parts)

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 3) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        message = EngineCoreRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params)
        assert self.core.add_request(message) is None

    def step_until(self, is_so: Callable[[], bool]) -> dict[str, list[int]]:
        """Step until the condition holds; return each request's tokens, and the cached tokens of its first output."""
        tokens: dict[str, list[int]] = {}
        give_up_at = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < give_up_at
            for output in self.core.step_fn():
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                self.cached[output.request_id] = output.num_cached_tokens
            self.core.check_invariants()
        return tokens

    def finish(self) -> dict[str, list[int]]:
        self.cached = {}
        return self.step_until(lambda: not self.core.has_work)

    def written(self) -> None:
        self.offload.write_behind.finish(DEADLINE_S)


@pytest.fixture
def filled() -> MemoryTier:
    """The memory tier of an engine that has answered PROMPT."""
    engine = Made()
    engine.add("before", PROMPT)
    engine.finish()
    engine.written()
    assert engine.memory.num_bytes == 4 * BLOCK_BYTES, "three of the prompt, one with what was said"
    return engine.memory


@given(
    load=st.lists(arrivals.map(lambda one: Arrival(**{**vars(one), "abort_step": None})), min_size=1, max_size=10),
    num_blocks=st.integers(MAX_MODEL_LEN // BLOCK_SIZE, 14),
    max_num_seqs=st.integers(1, 4),
    num_kept=st.integers(1, 30),
    is_ahead=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_request_gets_the_tokens_it_would_get_alone(
    load: list[Arrival], num_blocks: int, max_num_seqs: int, num_kept: int, is_ahead: bool
) -> None:
    """Twice, so that the second time much is read; in caches that hold little more than one request."""
    memory = MemoryTier(num_kept * BLOCK_BYTES, BLOCK_BYTES)
    for _ in range(2):
        engine = Made(memory, num_blocks, max_num_seqs, is_ahead=is_ahead)
        verify(load, run(engine.core, load))
        engine.written()
        stats = engine.core.stats().kv_offload
        assert stats is not None
        assert stats.num_hit_tokens <= stats.num_queried_tokens
        assert stats.num_corrupt_blocks == 0


@pytest.mark.parametrize("is_ahead", [False, True])
def test_the_beginning_of_a_request_is_read(filled: MemoryTier, is_ahead: bool) -> None:
    engine = Made(filled, is_ahead=is_ahead)
    engine.add("r", PROMPT)
    tokens = engine.finish()
    fresh = Made()
    fresh.add("r", PROMPT)
    assert tokens == fresh.finish()
    assert (engine.cached["r"], fresh.cached["r"]) == (12, 0)
    stats = engine.core.stats()
    assert stats.kv_offload is not None
    assert stats.kv_offload.num_hit_tokens == 12
    assert stats.kv_offload.num_read_bytes == 3 * BLOCK_BYTES
    assert stats.prefix_cache_hits == 12


def test_others_continue_while_one_waits_for_its_blocks(filled: MemoryTier) -> None:
    engine = Made(filled)
    engine.tiers.gate.clear()
    engine.add("reads", PROMPT)
    engine.add("same", [*PROMPT, 7])
    engine.add("computes", [9, 9, 9])
    others = engine.step_until(lambda: "computes" not in engine.core.scheduler)
    assert set(others) == {"computes"}
    assert engine.core.stats().num_waiting_reqs == 2
    assert engine.core.step_fn() == [], "nothing can be computed yet, and that is no failure"
    engine.tiers.gate.set()
    assert set(engine.finish()) == {"reads", "same"}
    assert engine.cached == {"reads": 12, "same": 12}
    stats = engine.core.stats().kv_offload
    assert stats is not None
    assert stats.num_read_bytes == 3 * BLOCK_BYTES, "one load was enough for both"


def test_a_request_that_waits_for_its_blocks_can_be_aborted(filled: MemoryTier) -> None:
    engine = Made(filled)
    engine.tiers.gate.clear()
    engine.add("gone", PROMPT)
    assert engine.core.step_fn() == []
    engine.core.abort_requests(["gone"])
    assert not engine.core.has_work
    engine.core.check_invariants()
    assert engine.pool.usage > 0, "the thread may still write"
    engine.tiers.gate.set()
    assert engine.core.forget_blocks(), "waits for it"
    assert engine.pool.usage == 0
    engine.add("again", PROMPT)
    engine.finish()
    assert engine.cached["again"] == 12


def test_a_disk_that_hangs_is_waited_for_no_longer(filled: MemoryTier) -> None:
    engine = Made(filled)
    engine.tiers.gate.clear()
    engine.add("r", PROMPT)
    assert engine.core.step_fn() == []
    assert engine.tiers.is_reached.wait(DEADLINE_S)
    engine.loads._loads[0].give_up_at_s = 0.0
    tokens = engine.finish()
    assert len(tokens["r"]) == 3
    assert engine.cached["r"] == 0
    assert engine.pool.usage > 0
    engine.tiers.gate.set()
    while engine.pool.usage:
        engine.core.check_invariants()


def test_a_preempted_request_is_read_again() -> None:
    """Two requests in a cache for little more than one: who is preempted has lost its blocks to the other."""
    engine = Made(num_blocks=7, max_num_seqs=2)
    engine.add("a", [5] * 9, 13)
    engine.add("b", [6] * 9, 13)
    tokens = engine.finish()
    stats = engine.core.stats()
    assert stats.num_preemptions > 0
    assert stats.kv_offload is not None
    for name, first in (("a", 5), ("b", 6)):
        alone = Made()
        alone.add(name, [first] * 9, 13)
        assert alone.finish()[name] == tokens[name]


def test_blocks_of_a_preempted_request_are_loaded_from_the_tier(filled: MemoryTier) -> None:
    """Its blocks were taken by others; it does not compute them again."""
    engine = Made(filled, num_blocks=8)
    engine.add("r", PROMPT, 8)
    scheduler = engine.scheduler
    engine.step_until(lambda: any(request.num_computed_tokens > 16 for request in scheduler._running))
    engine.written()
    scheduler._placement.preempt_last()
    assert scheduler.forget_blocks()
    before = engine.core.stats().kv_offload
    engine.finish()
    after = engine.core.stats().kv_offload
    assert before is not None
    assert after is not None
    assert after.num_hit_tokens - before.num_hit_tokens == 16


def test_a_block_that_is_taken_while_it_is_copied_is_not_kept() -> None:
    pool, memory = BlockPool(2, BLOCK_SIZE), MemoryTier(10 * BLOCK_BYTES, BLOCK_BYTES)
    cache = torch.zeros(2, BLOCK_SIZE, dtype=torch.int64)
    tiers = Tiers(memory, None)
    tiers.use(IDENTITY)

    class Slow(HostBlocks):
        def read(self, blocks: Any, rows: Row) -> None:
            super().read(blocks, rows)
            # Meanwhile another request has got it.
            pool.free([block])
            pool.allocate(2)

    (block,) = pool.allocate(1)
    behind = WriteBehind(tiers, Slow(lambda: [cache]), pool)
    behind.enqueue_block(block, b"h" * 32)
    behind.finish(DEADLINE_S)
    give_up_at = time.monotonic() + DEADLINE_S
    while not tiers.counters.num_dropped_blocks:
        assert time.monotonic() < give_up_at
    assert memory.num_bytes == 0


def test_notes_are_bounded() -> None:
    pool, tiers = BlockPool(3, BLOCK_SIZE), GatedTiers(MemoryTier(10 * BLOCK_BYTES, BLOCK_BYTES))
    tiers._identity = IDENTITY
    behind = WriteBehind(tiers, HostBlocks(lambda: [torch.zeros(3, BLOCK_SIZE, dtype=torch.int64)]), pool)
    blocks = pool.allocate(3)
    with behind._working:
        for number in range(30):
            behind.enqueue_block(blocks[0], bytes([number]) * 32)
        assert len(behind._queue) <= 3
    behind.finish(DEADLINE_S)
    assert tiers.counters.num_dropped_blocks >= 26


def test_resetting_the_prefix_cache_empties_the_tier(filled: MemoryTier) -> None:
    engine = Made(filled)
    assert engine.core.forget_blocks()
    assert filled.num_bytes > 0
    assert engine.core.reset_prefix_cache()
    assert filled.num_bytes == 0
    engine.add("r", PROMPT)
    engine.finish()
    assert engine.cached["r"] == 0


def test_prompts_with_logprobs_of_all_tokens_load_nothing(filled: MemoryTier) -> None:
    engine = Made(filled)
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=PROMPT, sampling_params=SamplingParams(max_tokens=2, prompt_logprobs=1)
    )
    assert engine.core.add_request(request) is None
    engine.finish()
    assert engine.cached["r"] == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_blocks_in_pieces_go_there_and_back(device: str) -> None:
    """Caches of several dtypes and shapes."""
    rng = np.random.default_rng(0)
    caches = [
        torch.from_numpy(rng.integers(0, 100, (5, 3, 2, 4))).to(device, torch.float32),
        torch.from_numpy(rng.integers(0, 100, (5, 7))).to(device, torch.bfloat16),
        torch.from_numpy(rng.integers(0, 100, (5, 3, 1))).to(device, torch.float8_e4m3fn),
    ]
    before = [cache.clone() for cache in caches]
    blocks = make_device_blocks(lambda: caches, torch.device(device))
    assert blocks.block_bytes == 24 * 4 + 7 * 2 + 3
    rows = np.zeros((2, blocks.block_bytes), np.uint8)
    blocks.read([4, 1], rows)
    for cache in caches:
        cache.zero_()
    blocks.write(rows, [0, 1])
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[0].view(torch.uint8), old[4].view(torch.uint8))
        assert torch.equal(cache[1].view(torch.uint8), old[1].view(torch.uint8))
        assert not cache[2:].view(torch.uint8).any()
