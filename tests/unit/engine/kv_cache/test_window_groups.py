"""Groups of layers with windows: pages go back as soon as no window needs them, and never earlier."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.errors import ConfigurationError
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.drafting.speculation import NoMemory, Speculation
from penstock.worker.engine.scheduling.block_pool import BlockGroups, BlockPool, InvariantError
from penstock.worker.engine.scheduling.block_tables import GroupedTables
from penstock.worker.engine.scheduling.ordering import FirstComeFirstServed, OrderingPolicy, Priority
from penstock.worker.engine.scheduling.prefix_cache import GroupHashCache
from penstock.worker.engine.scheduling.request import Request
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput

from ..paged_hash import Arrival, End, arrivals, run
from .group_hash import make_group_core

ROOMY = 500
kinds = st.sampled_from([(None, 4), (None, 1, 1), (None, 6, 6, 6), (None, None, 5, 9), (7,), (3, 8), (None, 23)])


def alone(windows: tuple[int | None, ...], one: Arrival) -> tuple[list[int], End]:
    core, _ = make_group_core(windows, ROOMY, extra_budget=40, is_ahead=False)
    outcome = run(core, [replace(one, step=0, abort_step=None)])
    return outcome.tokens["0"], outcome.ends["0"]


@given(
    windows=kinds,
    load=st.lists(arrivals, max_size=5),
    num_blocks=st.integers(0, 40),
    max_num_seqs=st.integers(1, 5),
    extra_budget=st.integers(0, 20),
    policy=st.sampled_from([FirstComeFirstServed(), Priority()]),
    is_caching=st.booleans(),
    way=st.sampled_from(["one", "ahead", "drafting", "several"]),
    failures=st.sets(st.integers(0, 20), max_size=1),
)
@settings(max_examples=40, deadline=None)
def test_every_request_gets_the_tokens_that_it_gets_alone(
    windows: tuple[int | None, ...],
    load: list[Arrival],
    num_blocks: int,
    max_num_seqs: int,
    extra_budget: int,
    policy: OrderingPolicy,
    is_caching: bool,
    way: str,
    failures: set[int],
) -> None:
    """Others may run as well: chunked, preempted, during batches in flight, with drafts, on cached blocks. A page
    without an owner is poisoned before each step, and all are free in the end (``run`` checks it)."""
    core, executor = make_group_core(
        windows,
        num_blocks,
        max_num_seqs,
        extra_budget,
        policy,
        is_caching=is_caching,
        is_ahead=way in ("ahead", "several"),
        drafting=Speculation(4, 6, NoMemory()) if way == "drafting" else None,
    )
    if way == "several":
        rng = random.Random(len(load))
        executor.num_at_once = lambda request: rng.randint(1, 4)
    executor.failures = {number: RuntimeError("boom") for number in failures}
    outcome = run(core, load)
    for index, one in enumerate(load):
        expected, end = alone(windows, one)
        tokens = outcome.tokens[str(index)]
        if one.abort_step is None:
            assert (tokens, outcome.ends[str(index)]) == (expected, end)
        else:
            assert tokens == expected[: len(tokens)]


def make_request(request_id: str, token_ids: list[int], max_model_len: int) -> Request:
    return Request(request_id, token_ids, SamplingParams(max_tokens=None), max_model_len=max_model_len)


def step(scheduler: Scheduler) -> SchedulerOutput:
    """Compute a step in which every request that catches up gets a 1."""
    output = scheduler.schedule()
    finish_step(scheduler, output)
    return output


def finish_step(scheduler: Scheduler, output: SchedulerOutput) -> None:
    caught_up = (r.num_uncomputed_tokens == n for r, n in output.work())
    scheduler.update_from_output(output, SampledTokens([[1] if has else [] for has in caught_up]))
    scheduler.check_invariants()


def make_scheduler(
    windows: tuple[int | None, ...],
    num_blocks: int,
    *,
    budget: int = 8,
    max_model_len: int = 100,
    caching: bool = False,
) -> Scheduler:
    pool, groups = BlockPool(num_blocks, 4), BlockGroups(windows, 4, budget)
    return Scheduler(
        pool,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        prefix_cache=GroupHashCache(pool, groups) if caching else None,
        tables=GroupedTables(pool, groups),
    )


def test_a_window_keeps_its_last_blocks_alone_also_while_a_prompt_is_computed() -> None:
    scheduler = make_scheduler((None, 8), 100)
    request = make_request("r", [5] * 60, 100)
    scheduler.add_request(request)
    num_held: list[int] = []
    while request.num_tokens < 80:
        output = scheduler.schedule()
        assert request.group_tables is not None
        num_held.append(sum(block != 100 for block in request.group_tables.tables[1]))
        finish_step(scheduler, output)
    assert (len(request.block_table), max(num_held), num_held[-1]) == (20, 4, 3)
    assert scheduler.stats().kv_cache_usage == pytest.approx(0.23)


def test_a_prompt_that_was_begun_is_never_short_of_blocks() -> None:
    """All that it will need of layers that see everything is its own from the first step, and a step's windows."""
    scheduler = make_scheduler((None, 8), 30)
    first, second = make_request("0", [5] * 60, 100), make_request("1", [6] * 20, 100)
    scheduler.add_request(first)
    scheduler.add_request(second)
    while first.num_computed_tokens < 60:
        assert second.num_computed_tokens == 0
        step(scheduler)
    assert scheduler.stats().num_preemptions == 0
    step(scheduler)
    assert second.num_computed_tokens > 0, "what the prompt has given back is enough for the other one"


def test_the_pool_has_to_hold_one_request_of_the_longest() -> None:
    groups = BlockGroups((None, 8), 4, 8)
    needed = groups.max_blocks_for(100)
    assert needed == 25 + 5
    make_scheduler((None, 8), needed)
    with pytest.raises(ConfigurationError, match="29 blocks of 4 tokens"):
        make_scheduler((None, 8), needed - 1)
    assert (groups.longest(needed, 200), groups.longest(needed - 1, 200), groups.longest(10_000, 77)) == (100, 96, 77)


def cached_after(windows: tuple[int | None, ...], first: list[int], second: list[int], num_blocks: int = 100) -> int:
    """Return the number of cached tokens of ``second`` once ``first`` was computed."""
    scheduler, output = make_scheduler(windows, num_blocks, caching=True), SchedulerOutput()
    for request_id, tokens in (("0", first), ("1", second)):
        scheduler.add_request(make_request(request_id, tokens, len(tokens) + 1))
        while scheduler.has_unfinished_requests:
            output = step(scheduler)
    assert scheduler.block_pool.num_free == num_blocks
    return output.requests[0].num_cached_tokens


@pytest.mark.parametrize("windows", [(None, 8), (8,), (None, 1, 30), (6, 9)])
def test_a_prefix_is_a_hit_if_its_last_window_is_cached(windows: tuple[int | None, ...]) -> None:
    assert cached_after(windows, [5] * 40, [5] * 40) == 36
    assert cached_after(windows, [5] * 40, [5] * 20 + [6] * 20) == 20
    assert cached_after(windows, [5] * 40, [6] * 40) == 0


def test_a_prefix_is_no_hit_once_a_group_lacks_its_blocks() -> None:
    """Pages are taken in the order in which they were given back: those behind windows first, then those that a request
    held at its end. So with the end of a prefix goes all of it, since in front of it there are no windows any more."""
    scheduler = make_scheduler((None, 8), 38, caching=True)
    scheduler.add_request(make_request("0", [5] * 60, 61))
    while scheduler.has_unfinished_requests:
        step(scheduler)
    cache, pool = scheduler._prefix_cache, scheduler.block_pool
    whole = make_request("again", [5] * 60, 61)
    assert len(cache.find(whole)) == 14
    blocks: list[int] = []
    hits = []
    while pool.num_free:
        blocks += pool.allocate(1)
        hits.append(len(cache.find(whole)))
    assert hits == sorted(hits, reverse=True)
    assert (set(hits), hits[0]) == ({14, 0}, 14)
    pool.free(blocks)


def test_pages_outside_the_window_point_to_the_null_block() -> None:
    tables = GroupedTables(BlockPool(4, 4), BlockGroups((None, 4), 4, 8))
    assert tables.null_block == 4
    with pytest.raises(InvariantError, match="no block tables"):
        tables.release(make_request("r", [1], 4))


def test_a_request_that_gets_one_token_after_the_other_holds_a_window_and_a_block() -> None:
    groups = BlockGroups((None, 1024, 1024), 16, 2048)
    assert groups.decode_blocks(4096) == 256 + 2 * 65
    assert groups.max_blocks_for(4096) == 256 + 2 * 193
    assert groups.max_blocks_for(100) == 3 * 7
    assert (groups.first_needed(1024, 1023), groups.first_needed(1024, 1039), groups.first_needed(1, 16)) == (0, 1, 1)
