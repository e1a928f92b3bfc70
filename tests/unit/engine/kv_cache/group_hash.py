"""``PagedHash`` for a model whose layers keep different parts of a request, on pages that groups share."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.core.in_flight import LookaheadCore
from penstock.worker.engine.core.step_input import IntArray, StepInput
from penstock.worker.engine.execution.batch import InputBatch
from penstock.worker.engine.scheduling.batches import BatchQueue
from penstock.worker.engine.scheduling.block_pool import BlockGroups, BlockPool
from penstock.worker.engine.scheduling.block_tables import GroupedTables
from penstock.worker.engine.scheduling.drafting import Drafting
from penstock.worker.engine.scheduling.ordering import OrderingPolicy
from penstock.worker.engine.scheduling.prefix_cache import GroupHashCache
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.scheduling.scheduler_output import SchedulerOutput

from ..paged_hash import BLOCK_SIZE, EOS, MAX_MODEL_LEN, VOCAB_SIZE, PagedHash

_NOTHING = -1


class GroupHash(PagedHash):
    """A page holds a token of one group, and the group's number. Each group's part of a token's hash is made of the
    tokens in its window, so a page that was given back too early, or to another, shows in the tokens, or is found
    poisoned.
    """

    def __init__(self, pool: BlockPool, groups: BlockGroups, max_num_seqs: int) -> None:
        super().__init__(pool.num_blocks + 1, max_num_seqs)
        self._batch = InputBatch(max_num_seqs, MAX_MODEL_LEN, BLOCK_SIZE, len(groups))
        self._pool, self._groups = pool, groups

    def launch(self, output: SchedulerOutput) -> None:
        self._poison()
        super().launch(output)

    def _store(self, step: StepInput) -> None:
        assert step.group_slots is not None
        for group, slots in enumerate(step.group_slots):
            self._cache[slots] = step.token_ids * len(self._groups) + group

    def _poison(self) -> None:
        """Poison every page without an owner that no lookup can find, and always the null block."""
        for block in [*self._pool._blank, self._pool.num_blocks]:
            self._cache[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = _NOTHING

    def _token(self, step: StepInput, index: int, num_known: int, following: list[int]) -> int:
        num_groups, total, num_tokens = len(self._groups), 0, num_known + len(following)
        for group, window in enumerate(self._groups.windows):
            first = 0 if window is None else max(0, num_tokens - window)
            stored = self._group_slots(step, index, group, np.arange(first, num_known))
            tokens = [token * num_groups + group for token in following[max(0, first - num_known) :]]
            context = np.append(self._cache[stored], tokens).astype(np.int64)
            assert (context != _NOTHING).all(), "a slot was read that was given back, or never written"
            assert (context % num_groups == group).all(), "a slot of another group was read"
            context = context // num_groups
            total += int((context * (np.arange(first, num_tokens) % 5 + 3 + group)).sum())
        return total * 7919 % 1009 % VOCAB_SIZE

    def _group_slots(self, step: StepInput, index: int, group: int, positions: IntArray) -> IntArray:
        assert self._batch.tables.tables is not None
        blocks = self._batch.tables.tables[group, step.rows[index], positions // BLOCK_SIZE]
        return blocks * BLOCK_SIZE + positions % BLOCK_SIZE


def make_group_core(
    windows: tuple[int | None, ...],
    num_blocks: int,
    max_num_seqs: int = 4,
    extra_budget: int = 8,
    policy: OrderingPolicy | None = None,
    *,
    is_caching: bool = False,
    is_ahead: bool = True,
    drafting: Drafting | None = None,
) -> tuple[EngineCore, GroupHash]:
    """Make a core as ``make_core`` does; ``num_blocks`` counts blocks beyond those that one request needs."""
    budget = max_num_seqs + extra_budget
    groups = BlockGroups(windows, BLOCK_SIZE, budget * (1 + is_ahead))
    pool = BlockPool(groups.max_blocks_for(MAX_MODEL_LEN) + num_blocks, BLOCK_SIZE)
    executor = GroupHash(pool, groups, max_num_seqs)
    scheduler = Scheduler(
        pool,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=MAX_MODEL_LEN,
        policy=policy,
        prefix_cache=GroupHashCache(pool, groups) if is_caching else None,
        drafting=drafting,
        tables=GroupedTables(pool, groups),
    )
    parts: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_token_ids": [EOS]}
    if not is_ahead:
        return EngineCore(scheduler, executor, **parts), executor
    return LookaheadCore(BatchQueue(executor), scheduler, executor, **parts), executor
