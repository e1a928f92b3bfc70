"""Block tables of the running batch as arrays, a row for each request."""

from __future__ import annotations

import numpy as np

from ..core.step_input import IntArray
from ..scheduling.blocks.block_groups import GroupTables
from ..scheduling.request import Request


class TableRows:
    """Rows of requests with a single table.

    Attributes:
        table: ``[max_num_seqs, max_blocks]``; entries after a request's last block are undefined.
        tables: ``[G, max_num_seqs, max_blocks]`` if groups of layers have separate tables; None here.
    """

    tables: IntArray | None = None

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.table = np.zeros((max_num_seqs, max_blocks), np.int64)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)

    def reset_row(self, row: int) -> None:
        """Reset the row for another request."""
        self._num_blocks[row] = 0

    def update(self, rows: IntArray, requests: list[Request]) -> None:
        """Copy the changed block tables of the requests in ``rows``."""
        num_blocks = np.array([len(request.block_table) for request in requests], np.int64)
        for index in np.nonzero(num_blocks != self._num_blocks[rows])[0].tolist():
            row, num_copied, blocks = rows[index], self._num_blocks[rows[index]], requests[index].block_table
            self.table[row, num_copied : len(blocks)] = blocks[num_copied:]
        self._num_blocks[rows] = num_blocks

    def slots(self, row_of_token: IntArray, positions: IntArray) -> tuple[IntArray, IntArray | None]:
        """Return ``StepInput.slot_mapping`` and ``StepInput.group_slots`` for tokens at ``positions``."""
        blocks, offsets = np.divmod(positions, self.block_size)
        return self.table[row_of_token, blocks] * self.block_size + offsets, None

    def no_slots(self, num_tokens: int) -> IntArray | None:
        """Return ``StepInput.group_slots`` for tokens that are not stored."""
        return None

    def assign_first_blocks(self, request: Request) -> None:
        """Assign the first blocks to ``request``, as many as it needs to begin. No other request may hold blocks."""
        request.block_table = [0]


class GroupTableRows(TableRows):
    """Rows of requests with a table for each of ``num_groups`` groups; ``table`` is the first."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, num_groups: int) -> None:
        super().__init__(0, 0, block_size)
        self.tables = np.zeros((num_groups, max_num_seqs, max_blocks), np.int64)
        self.table = self.tables[0]
        self._versions = np.full(max_num_seqs, -1)
        self._lengths = np.zeros((max_num_seqs, num_groups), np.int64)
        self._firsts = np.zeros((max_num_seqs, num_groups), np.int64)

    def reset_row(self, row: int) -> None:
        self._versions[row], self._lengths[row], self._firsts[row] = -1, 0, 0

    def update(self, rows: IntArray, requests: list[Request]) -> None:
        grouped = [_tables_of(request) for request in requests]
        versions = np.array([tables.version for tables in grouped], np.int64)
        for index in np.nonzero(versions != self._versions[rows])[0].tolist():
            self._copy_changes(rows[index], grouped[index])
        self._versions[rows] = versions

    def _copy_changes(self, row: int, grouped: GroupTables) -> None:
        assert self.tables is not None
        for group, (table, first) in enumerate(zip(grouped.tables, grouped.firsts, strict=True)):
            target, length, old_first = self.tables[group, row], self._lengths[row, group], self._firsts[row, group]
            target[length : len(table)] = table[length:]
            target[old_first:first] = table[old_first:first]
            self._lengths[row, group], self._firsts[row, group] = len(table), first

    def slots(self, row_of_token: IntArray, positions: IntArray) -> tuple[IntArray, IntArray | None]:
        assert self.tables is not None
        blocks, offsets = np.divmod(positions, self.block_size)
        # Contiguous, because numpy's memory order of the group axis differs from the shape's.
        slots = np.ascontiguousarray(self.tables[:, row_of_token, blocks] * self.block_size + offsets)
        return slots[0], slots

    def no_slots(self, num_tokens: int) -> IntArray | None:
        assert self.tables is not None
        return np.full((len(self.tables), num_tokens), -1)

    def assign_first_blocks(self, request: Request) -> None:
        assert self.tables is not None
        num_groups = len(self.tables)
        request.group_tables = GroupTables([[group] for group in range(num_groups)], [0] * num_groups)
        request.block_table = request.group_tables.tables[0]


def _tables_of(request: Request) -> GroupTables:
    assert request.group_tables is not None, f"request {request.request_id} runs without block tables"
    return request.group_tables
