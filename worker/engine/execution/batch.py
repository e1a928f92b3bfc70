"""Requests of the running batch as arrays, kept between steps.

Python code handles a request when it enters and when it gets a block. In every other step it only reads two numbers per
request; the rest is vectorised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.step_input import IntArray, StepInput
from ..sampling.logprobs import PromptRowTable
from ..sampling.sampler import SamplingTable
from ..scheduling.block_pool import GroupTables
from ..scheduling.request import NO_LORA, Request
from ..scheduling.scheduler_output import SchedulerOutput
from .input_tables import AxesTable, EmbedsTable, VisibleEndsTable


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


class RowTable(Protocol):
    """A property of a few requests, by row of the batch; empty while no request has it."""

    def set_row(self, row: int, request: Request) -> None: ...

    def forget_row(self, row: int) -> None: ...


@dataclass(frozen=True)
class ExpectedTokens:
    """Sampled tokens that the host has not read yet.

    Args:
        rows: ``[R]``.
        places: ``[R]``, where the tokens follow those of the rows.
        assignments: ``[R]``, how often each row was assigned to a request before.
    """

    rows: IntArray
    places: IntArray
    assignments: IntArray


class InputBatch:
    """Arrays with a row for each running request.

    Args:
        num_groups: number of groups of layers with separate block tables; None for one table for all layers.

    Attributes:
        sampling: parameters that choose the next token.
        prompt_rows, embeds, axes, visible_ends: requests with more inputs than token ids, or more outputs than the next
            token.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int | None = None) -> None:
        size = max_num_seqs, -(-max_model_len // block_size), block_size
        self.tables = TableRows(*size) if num_groups is None else GroupTableRows(*size, num_groups)
        self.block_size = block_size
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.sampling = SamplingTable(max_num_seqs)
        self.prompt_rows = PromptRowTable()
        self.embeds = EmbedsTable()
        self.axes = AxesTable()
        self.visible_ends = VisibleEndsTable()
        self._row_tables: tuple[RowTable, ...] = (self.prompt_rows, self.embeds, self.axes, self.visible_ends)
        self._lora_indices = np.full(max_num_seqs, NO_LORA)
        self._assignments = np.zeros(max_num_seqs, np.int64)
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        # Requests of the last step and their rows: mostly the next step has the same.
        self._last_requests: list[Request] = []
        self._last_rows = np.zeros(0, np.int64)
        self._has_lora = False  # whether any of them has an adapter
        self._counting = np.arange(max_num_seqs)
        self._ones = np.ones(max_num_seqs, np.int64)

    @property
    def block_table(self) -> IntArray:
        """First table of each request, ``[max_num_seqs, max_blocks]``."""
        return self.tables.table

    def prepare(self, output: SchedulerOutput) -> StepInput:
        """Update the rows and pack the step's tokens."""
        self.release(output.released_ids)
        rows = self._rows_of(output.requests)
        computed = np.array([r.num_computed_tokens + r.num_in_flight_tokens for r in output.requests], np.int64)
        if len(rows) == sum(output.num_new_tokens):
            return self._pack_decodes(rows, computed)
        query_lens = np.array(output.num_new_tokens, np.int64)
        num_drafts = self._write_drafts(output, rows)
        order = np.lexsort((self._lora_indices[rows], query_lens > 1))
        rows, computed, query_lens, num_drafts = rows[order], computed[order], query_lens[order], num_drafts[order]
        seq_lens = computed + query_lens
        ends = np.cumsum(query_lens)
        row_of_token = np.repeat(rows, query_lens)
        positions = np.arange(ends[-1]) + np.repeat(seq_lens - ends, query_lens)
        sampled = np.nonzero(seq_lens - num_drafts == self.num_tokens[rows])[0]
        logit_rows, num_drafts = ends[sampled] - 1, num_drafts[sampled]
        if output.drafts:
            counts = num_drafts + 1
            num_following = np.repeat(np.cumsum(counts), counts) - np.arange(counts.sum()) - 1
            logit_rows = np.repeat(logit_rows, counts) - num_following
        slot_mapping, group_slots = self.tables.slots(row_of_token, positions)
        return StepInput(
            order=order,
            rows=rows,
            token_ids=self.token_ids[row_of_token, positions].astype(np.int64),
            positions=positions,
            slot_mapping=slot_mapping,
            query_lens=query_lens,
            seq_lens=seq_lens,
            logit_rows=logit_rows,
            sampled=sampled,
            token_lora=self._lora_indices[row_of_token] if self._has_lora else None,
            num_drafts=num_drafts if output.drafts else None,
            group_slots=group_slots,
        )

    def _write_drafts(self, output: SchedulerOutput, rows: IntArray) -> IntArray:
        """Write draft tokens after the known tokens of ``rows``; return their numbers, ``[B]``.

        New tokens will overwrite them.
        """
        num_drafts = np.zeros(len(rows), np.int64)
        for place, drafts in output.drafts.items():
            row, num_drafts[place] = rows[place], len(drafts)
            start = self.num_tokens[row]
            self.token_ids[row, start : start + len(drafts)] = drafts
        return num_drafts

    def _pack_decodes(self, rows: IntArray, computed: IntArray) -> StepInput:
        """Pack one token of each row: needs no repetition, and sorts rows only to group them by adapter."""
        places = order = self._counting[: len(rows)]
        if self._has_lora:
            order = np.argsort(self._lora_indices[rows], kind="stable")
            rows, computed = rows[order], computed[order]
        seq_lens = computed + 1
        has_caught_up = seq_lens == self.num_tokens[rows]
        sampled = places if has_caught_up.all() else np.nonzero(has_caught_up)[0]
        slot_mapping, group_slots = self.tables.slots(rows, computed)
        return StepInput(
            order=order,
            rows=rows,
            token_ids=self.token_ids[rows, computed].astype(np.int64),
            positions=computed,
            slot_mapping=slot_mapping,
            query_lens=self._ones[: len(rows)],
            seq_lens=seq_lens,
            logit_rows=sampled,
            sampled=sampled,
            token_lora=self._lora_indices[rows] if self._has_lora else None,
            group_slots=group_slots,
        )

    def release(self, request_ids: list[str]) -> None:
        """Forget the rows of these requests."""
        if request_ids:
            self._last_requests = []
        for request_id in request_ids:
            row = self._rows.pop(request_id, None)
            if row is not None:
                self.sampling.forget_row(row)
                for table in self._row_tables:
                    table.forget_row(row)
                self._free_rows.append(row)

    def append_tokens(self, rows: IntArray, token_ids: IntArray) -> None:
        """Record the new tokens of ``rows``. A request that ends with its token releases its row in the next step."""
        self._write_tokens(rows, self.num_tokens[rows], token_ids)
        self.num_tokens[rows] += 1
        self.sampling.append_tokens(rows, token_ids)

    def expect_tokens(self, rows: IntArray) -> ExpectedTokens:
        """Record that ``rows``, ``[R]``, get a token each, which the host does not know yet.

        Until the tokens are received, ``prepare`` gives their indices among the ``R`` in place of them, from ``-R`` on.
        """
        expected = ExpectedTokens(rows, self.num_tokens[rows], self._assignments[rows])
        self._write_tokens(rows, expected.places, np.arange(-len(rows), 0))
        self.num_tokens[rows] += 1
        return expected

    def receive_tokens(self, expected: ExpectedTokens, token_ids: IntArray) -> None:
        """Record the tokens of ``expected``, ``[R]``, except for rows that have another request meanwhile."""
        is_current = self._is_current(expected)
        rows, token_ids = expected.rows[is_current], token_ids[is_current]
        self._write_tokens(rows, expected.places[is_current], token_ids)
        self.sampling.append_tokens(rows, token_ids)

    def forget_tokens(self, expected: ExpectedTokens) -> None:
        """Undo ``expect_tokens``. Undo later ones first."""
        self.num_tokens[expected.rows[self._is_current(expected)]] -= 1

    def _is_current(self, expected: ExpectedTokens) -> NDArray[np.bool_]:
        """Return ``[R]``, whether each row still has the request whose token is expected."""
        return self._assignments[expected.rows] == expected.assignments

    def _write_tokens(self, rows: IntArray, places: IntArray, token_ids: IntArray) -> None:
        # A request that has just reached the maximum length ends with this token, which is never an input.
        fits = places < self.token_ids.shape[1]
        self.token_ids[rows[fits], places[fits]] = token_ids[fits]

    def _rows_of(self, requests: list[Request]) -> IntArray:
        """Return the rows of ``requests``, the same array while they are the same. Do not write to it."""
        if requests != self._last_requests:
            self._last_requests = []
            self._last_rows = np.array([self._row_of(request) for request in requests], np.int64)
            self._has_lora = bool((self._lora_indices[self._last_rows] != NO_LORA).any())
            self._last_requests = requests
        rows = self._last_rows
        self.tables.update(rows, requests)
        return rows

    def _row_of(self, request: Request) -> int:
        row = self._rows.get(request.request_id)
        if row is None:
            row = self._free_rows[-1]
            self._assignments[row] += 1
            self.token_ids[row, : request.num_tokens] = request.token_ids
            self.num_tokens[row] = request.num_tokens
            self.tables.reset_row(row)
            self._lora_indices[row] = request.lora_index
            self.sampling.set_row(row, request)
            for table in self._row_tables:
                table.forget_row(row)  # because an earlier attempt may have raised
                table.set_row(row, request)
            # Last, so that the row stays free if anything above raises, and no request runs with an incomplete row.
            self._rows[request.request_id] = self._free_rows.pop()
        return row
