"""The block pool against a model of it: block tables, the order of freed blocks, and the content of blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.worker.engine.scheduling.block_pool import BlockPool, InvariantError

ACTIONS = st.tuples(st.sampled_from(["take", "free", "name", "share", "forget"]), st.integers(0, 12))


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


class PoolModel:
    """The pool in plain lists. Block tables of named blocks begin with the same names, as those of a prefix do."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks, block_size=16)
        self.tables: list[list[int]] = []
        self.name_of: dict[int, bytes] = {}
        self.freed: list[int] = []

    def take(self, amount: int) -> None:
        if amount > self.pool.num_free:
            return
        blocks = self.pool.allocate(amount)
        blank = [block for block in self.free_blocks() if block not in self.name_of]
        evicted = [block for block in self.freed if block in self.name_of][: max(0, amount - len(blank))]
        assert set(evicted) <= set(blocks), "other named blocks than the least recently freed were taken"
        assert set(blocks) - set(evicted) <= set(blank), "a named block was taken before a blank one"
        for block in evicted:
            del self.name_of[block]
        self.freed = [block for block in self.freed if block not in blocks]
        self.tables.append(blocks)

    def free(self, index: int) -> None:
        if self.tables:
            table = self.tables.pop(index % len(self.tables))
            self.pool.free(table)
            self.freed += [block for block in reversed(table) if not self.is_held(block)]

    def name_table(self, index: int) -> None:
        if self.tables:
            for number, block in enumerate(self.tables[index % len(self.tables)]):
                if block not in self.name_of:
                    self.pool.set_hash(block, name(number))
                    if name(number) not in self.name_of.values():
                        self.name_of[block] = name(number)

    def share(self, amount: int) -> None:
        hits = self.pool.find(name(number) for number in range(amount))
        blocks = {block_name: block for block, block_name in self.name_of.items()}
        missing = next((n for n in range(amount) if name(n) not in blocks), amount)
        assert hits == [blocks[name(n)] for n in range(missing)]
        assert self.pool.num_free_among(hits) == len([block for block in hits if not self.is_held(block)])
        self.pool.hold(hits)
        self.freed = [block for block in self.freed if block not in hits]
        self.tables.append(hits)

    def forget(self) -> None:
        is_free = not any(self.tables)
        assert self.pool.forget_hashes() == is_free
        if is_free:
            self.name_of.clear()

    def is_held(self, block: int) -> bool:
        return any(block in table for table in self.tables)

    def free_blocks(self) -> list[int]:
        return [block for block in range(self.num_blocks) if not self.is_held(block)]

    def check(self) -> None:
        self.pool.check_invariants(self.tables)
        assert self.pool.num_free == len(self.free_blocks())
        assert self.pool.usage == pytest.approx(1 - self.pool.num_free / self.num_blocks)
        assert {block: self.pool.hash_of(block) for block in self.name_of} == self.name_of


@given(st.integers(1, 24), st.lists(ACTIONS, max_size=60))
def test_blocks_are_shared_kept_and_taken_by_the_rules(num_blocks: int, actions: list[tuple[str, int]]) -> None:
    model = PoolModel(num_blocks)
    for action, amount in actions:
        match action:
            case "take":
                model.take(amount)
            case "free":
                model.free(amount)
            case "name":
                model.name_table(amount)
            case "share":
                model.share(amount)
            case "forget":
                model.forget()
        model.check()
    while model.tables:
        model.free(0)
    model.check()
    assert model.pool.num_free == num_blocks
    assert model.pool.usage == 0


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(1, block_size=16)
    assert [pool.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_more_than_is_free_is_refused_and_takes_nothing() -> None:
    pool = BlockPool(3, block_size=1)
    with pytest.raises(InvariantError):
        pool.allocate(4)
    assert pool.num_free == 3


def named_table(pool: BlockPool, names: list[int]) -> list[int]:
    table = pool.allocate(len(names))
    for block, number in zip(table, names, strict=True):
        pool.set_hash(block, name(number))
    return table


def test_the_last_blocks_of_the_least_recently_freed_table_go_first() -> None:
    pool = BlockPool(6, block_size=1)
    older, newer = named_table(pool, [1, 2, 3]), named_table(pool, [4, 5, 6])
    pool.free(older)
    pool.free(newer)
    # One that is used again counts as freed later.
    (again,) = pool.find([name(1)])
    pool.hold([again])
    pool.free([again])
    assert [pool.allocate(1)[0] for _ in range(6)] == [older[2], older[1], newer[2], newer[1], newer[0], older[0]]


def test_a_block_in_use_is_not_evicted_and_is_freed_by_its_last_user() -> None:
    pool = BlockPool(2, block_size=1)
    table = named_table(pool, [1, 2])
    pool.hold(table)
    pool.free(table)
    assert (pool.num_free, pool.usage) == (0, 1.0)
    pool.free(table)
    assert (pool.num_free, pool.usage) == (2, 0.0)


def test_the_first_of_two_equal_blocks_is_a_hit() -> None:
    pool = BlockPool(4, block_size=1)
    first, second = named_table(pool, [1]), named_table(pool, [1])
    assert pool.find([name(1)]) == first
    assert pool.hash_of(second[0]) is None
    pool.free(first)
    pool.free(second)
    pool.check_invariants([])
    assert first[0] not in pool.allocate(3), "the copy is of no use, and goes before what can be found"


@pytest.mark.parametrize(
    "tables",
    [[[0]], [[0, 1], [1]], [[0, 7]], [[0, 0]]],
    ids=["lost", "held twice", "unknown", "twice in one table"],
)
def test_a_wrong_table_is_detected(tables: list[list[int]]) -> None:
    pool = BlockPool(2, block_size=1)
    pool.allocate(2)
    with pytest.raises(InvariantError):
        pool.check_invariants(tables)


def test_a_block_that_is_both_held_and_free_is_detected() -> None:
    pool = BlockPool(2, block_size=1)
    pool._blank.append(pool.allocate(1)[0])
    with pytest.raises(InvariantError, match="without a holder"):
        pool.check_invariants([[0]])


def test_a_wrong_hash_is_detected() -> None:
    pool = BlockPool(2, block_size=1)
    pool.free(named_table(pool, [1]))
    pool._hashes[0] = name(2)
    with pytest.raises(InvariantError, match="hashes"):
        pool.check_invariants([])
    pool._hashes[0] = None
    with pytest.raises(InvariantError, match="evictable"):
        pool.check_invariants([])
