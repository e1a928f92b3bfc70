"""The block tables of the running batch as arrays, a row for each request."""

from __future__ import annotations

import numpy as np

from ..core.step_input import IntArray
from ..scheduling.blocks.block_groups import GroupTables
from ..scheduling.request import Request


class TableRows:
    """Of requests that have one table.

    Attributes:
        table: ``[max_num_seqs, max_blocks]``; past a request's last block there is nothing to be read.
        tables: ``[G, max_num_seqs, max_blocks]`` where groups of layers have their own; None here.
    """

    tables: IntArray | None = None

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.table = np.zeros((max_num_seqs, max_blocks), np.int64)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)

    def forget(self, row: int) -> None:
        """The row is another request's from now on."""
        self._num_blocks[row] = 0

    def update(self, rows: IntArray, requests: list[Request]) -> None:
        """Take over what has changed of the requests in ``rows``."""
        num_blocks = np.array([len(request.block_table) for request in requests], np.int64)
        for index in np.nonzero(num_blocks != self._num_blocks[rows])[0].tolist():
            row, known, blocks = rows[index], self._num_blocks[rows[index]], requests[index].block_table
            self.table[row, known : len(blocks)] = blocks[known:]
        self._num_blocks[rows] = num_blocks

    def slots(self, row_of_token: IntArray, positions: IntArray) -> tuple[IntArray, IntArray | None]:
        """``StepInput.slot_mapping`` and ``StepInput.group_slots`` of tokens at ``positions``."""
        blocks, offsets = np.divmod(positions, self.block_size)
        return self.table[row_of_token, blocks] * self.block_size + offsets, None

    def no_slots(self, num_tokens: int) -> IntArray | None:
        """``StepInput.group_slots`` of tokens that are stored nowhere."""
        return None

    def lend_first(self, request: Request) -> None:
        """Give ``request`` the first blocks of all, as many as it needs to begin; nobody else has any."""
        request.block_table = [0]


class GroupTableRows(TableRows):
    """Of requests that have a table for each of ``num_groups``; ``table`` is the first."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, num_groups: int) -> None:
        super().__init__(0, 0, block_size)
        self.tables = np.zeros((num_groups, max_num_seqs, max_blocks), np.int64)
        self.table = self.tables[0]
        self._versions = np.full(max_num_seqs, -1)
        self._lengths = np.zeros((max_num_seqs, num_groups), np.int64)
        self._firsts = np.zeros((max_num_seqs, num_groups), np.int64)

    def forget(self, row: int) -> None:
        self._versions[row], self._lengths[row], self._firsts[row] = -1, 0, 0

    def update(self, rows: IntArray, requests: list[Request]) -> None:
        found = [_tables_of(request) for request in requests]
        versions = np.array([tables.version for tables in found], np.int64)
        for index in np.nonzero(versions != self._versions[rows])[0].tolist():
            self._take(rows[index], found[index])
        self._versions[rows] = versions

    def _take(self, row: int, found: GroupTables) -> None:
        assert self.tables is not None
        for group, (table, first) in enumerate(zip(found.tables, found.firsts, strict=True)):
            into, length, known_first = self.tables[group, row], self._lengths[row, group], self._firsts[row, group]
            into[length : len(table)] = table[length:]
            into[known_first:first] = table[known_first:first]
            self._lengths[row, group], self._firsts[row, group] = len(table), first

    def slots(self, row_of_token: IntArray, positions: IntArray) -> tuple[IntArray, IntArray | None]:
        assert self.tables is not None
        blocks, offsets = np.divmod(positions, self.block_size)
        # numpy puts the axis of groups elsewhere in memory than in the shape.
        slots = np.ascontiguousarray(self.tables[:, row_of_token, blocks] * self.block_size + offsets)
        return slots[0], slots

    def no_slots(self, num_tokens: int) -> IntArray | None:
        assert self.tables is not None
        return np.full((len(self.tables), num_tokens), -1)

    def lend_first(self, request: Request) -> None:
        assert self.tables is not None
        num_groups = len(self.tables)
        request.group_tables = GroupTables([[group] for group in range(num_groups)], [0] * num_groups)
        request.block_table = request.group_tables.tables[0]


def _tables_of(request: Request) -> GroupTables:
    assert request.group_tables is not None, f"request {request.request_id} runs without block tables"
    return request.group_tables
