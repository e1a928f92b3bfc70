"""The block pool against a model of it: a set of free blocks and a list of tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.worker.engine.block_pool import BlockPool, InvariantError


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_every_block_is_free_or_held_once(num_blocks: int, actions: list[tuple[bool, int]]) -> None:
    pool = BlockPool(num_blocks, block_size=16)
    tables: list[list[int]] = []
    for takes, amount in actions:
        if takes and amount <= pool.num_free:
            tables.append(pool.allocate(amount))
        elif not takes and tables:
            pool.free(tables.pop(amount % len(tables)))
        pool.check_invariants(tables)
        assert pool.num_free == num_blocks - sum(map(len, tables))
        assert pool.usage == pytest.approx(1 - pool.num_free / num_blocks)
    for table in tables:
        pool.free(table)
    pool.check_invariants([])
    assert pool.num_free == num_blocks


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(1, block_size=16)
    assert [pool.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_more_than_is_free_is_refused_and_takes_nothing() -> None:
    pool = BlockPool(3, block_size=1)
    with pytest.raises(InvariantError):
        pool.allocate(4)
    assert pool.num_free == 3


@pytest.mark.parametrize("tables", [[[0]], [[0, 1], [1]], [[0, 7]]], ids=["lost", "held twice", "unknown"])
def test_a_wrong_table_is_found(tables: list[list[int]]) -> None:
    pool = BlockPool(2, block_size=1)
    pool.allocate(2)
    with pytest.raises(InvariantError):
        pool.check_invariants(tables)
