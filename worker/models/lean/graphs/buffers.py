"""Where captured steps find their inputs: tensors that stay where they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .....kernels.paged_attention import DeviceRows, PagedBatch
from ...forward import ModelInput
from ...to_device import to_device


@dataclass(frozen=True)
class Places:
    """What all captured steps of a set have in common.

    Args:
        num_columns, num_groups: of block tables, and how many a request has.
        max_seq_len: most tokens of a request.
        like: a tensor ``[..., hidden size]`` of the dtype and device of hidden rows.
        has_adapters: both, where steps may have adapters: such steps have graphs of their own.
    """

    num_columns: int
    num_groups: int
    block_size: int
    max_seq_len: int
    like: Tensor
    has_adapters: tuple[bool, ...]


class _Buffers:
    """Inputs and result of steps of up to ``N`` tokens of up to ``B`` rows. At first none is in use."""

    def __init__(self, num_tokens: int, num_rows: int, places: Places) -> None:
        self._places = places
        self._new = partial(torch.zeros, dtype=torch.int64, device=places.like.device)
        self._token_ids, self._positions = self._new(num_tokens), self._new(num_tokens)
        self._slots = self._new((places.num_groups, num_tokens)) - 1
        self._tables = self._new((places.num_groups, num_rows, places.num_columns))
        self._token_lora = self._new(num_tokens) - 1
        self.hidden = places.like.new_zeros(num_rows, places.like.shape[-1])

    def _input_of(self, num_tokens: int, logit_rows: Tensor, batch: PagedBatch, *, has_adapters: bool) -> ModelInput:
        return ModelInput(
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            logit_rows=logit_rows,
            batch=batch,
            state_slots=np.zeros(len(logit_rows), np.int64),
            token_lora=self._token_lora[:num_tokens] if has_adapters else None,
        )

    def _of_groups(self, num_tokens: int, num_rows: int) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Tables and slots of the first group, and those of all where there are several, as a batch takes them."""
        tables, slots = self._tables[:, :num_rows], self._slots[:, :num_tokens]
        return tables[0], slots[0], (tables, slots) if len(tables) > 1 else ()

    def _fill_tokens(self, step: ModelInput, size: int) -> None:
        """Copy the tokens of ``step`` and where they lie; the others of the first ``size`` are not in use then."""
        batch, num_tokens = step.batch, len(step.token_ids)
        self._token_ids[:num_tokens].copy_(step.token_ids)
        self._positions[:num_tokens].copy_(step.positions)
        self._slots[:, :num_tokens].copy_(batch.slot_mapping if batch.group_slots is None else batch.group_slots)
        # What a table has beyond is of no request.
        table = (batch.block_table if batch.group_tables is None else batch.group_tables)[..., : self._tables.shape[2]]
        self._tables[:, : table.shape[-2], : table.shape[-1]].copy_(table)
        if num_tokens < size:
            self._slots[:, num_tokens:size].fill_(-1)
        if step.token_lora is not None:
            self._token_lora[:num_tokens].copy_(step.token_lora)
            self._token_lora[num_tokens:size].fill_(-1)


class DecodeBuffers(_Buffers):
    """Of steps whose rows all have one token."""

    def __init__(self, num_rows: int, places: Places) -> None:
        super().__init__(num_rows, num_rows, places)
        self._seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=places.like.device)
        self._logit_rows = torch.arange(num_rows, device=places.like.device)

    def input_of(self, size: int, *, has_adapters: bool) -> ModelInput:
        """The first ``size`` rows as a step."""
        places = self._places
        table, slots, of_groups = self._of_groups(size, size)
        batch = PagedBatch.captured_decode(
            table, slots, self._seq_lens[:size], places.max_seq_len, places.block_size, *of_groups
        )
        return self._input_of(size, self._logit_rows[:size], batch, has_adapters=has_adapters)

    def fill(self, step: ModelInput, size: int) -> None:
        """Copy the rows of ``step``, all decodes; the others of the first ``size`` are not in use then."""
        self._fill_tokens(step, size)
        num_rows = len(step.token_ids)
        self._seq_lens[:num_rows].copy_(step.batch.device_rows.seq_lens)
        if num_rows < size:
            self._seq_lens[num_rows:size].zero_()


class PromptBuffers(_Buffers):
    """Of steps in which some rows have several tokens."""

    def __init__(self, num_tokens: int, num_rows: int, places: Places) -> None:
        super().__init__(num_tokens, num_rows, places)
        # Where rows begin, their lengths, and those of decodes; one copy brings all.
        self._rows = torch.zeros(3, num_rows + 1, dtype=torch.int32, device=places.like.device)
        self._rows[2] = -1
        self._logit_rows = self._new(num_rows)

    def input_of(self, num_tokens: int, num_rows: int, *, has_adapters: bool) -> ModelInput:
        """The first ``num_tokens`` tokens and ``num_rows`` rows as a step."""
        table, slots, of_groups = self._of_groups(num_tokens, num_rows)
        starts, seq_lens, decode_lens = self._rows
        rows = DeviceRows(
            starts[: num_rows + 1],
            seq_lens[:num_rows],
            num_tokens,
            self._places.max_seq_len,
            decode_lens[:num_rows],
        )
        batch = PagedBatch.captured_rows(table, slots, rows, self._places.block_size, *of_groups)
        return self._input_of(num_tokens, self._logit_rows[:num_rows], batch, has_adapters=has_adapters)

    def fill(self, step: ModelInput, size: int) -> None:
        """Copy ``step``, of no more logits than rows; the others of the first ``size`` tokens are not in use then."""
        self._fill_tokens(step, size)
        self._rows.copy_(to_device(self._rows_of(step.batch), self._rows.device))
        # The others' logits nobody asks for, but the tokens must be there.
        self._logit_rows.zero_()
        self._logit_rows[: len(step.logit_rows)].copy_(step.logit_rows)

    def _rows_of(self, batch: PagedBatch) -> NDArray[np.int32]:
        """What ``_rows`` is for ``batch``; a row that is not in use begins where the last one ends."""
        num_rows = len(batch.query_lens)
        query_lens, seq_lens = np.asarray(batch.query_lens), np.asarray(batch.seq_lens)
        rows = np.zeros(self._rows.shape, np.int32)
        rows[0, 1 : num_rows + 1] = query_lens.cumsum()
        rows[0, num_rows + 1 :] = batch.num_tokens
        rows[1, :num_rows] = seq_lens
        rows[2] = -1
        rows[2, :num_rows] = np.where(query_lens == 1, seq_lens, -1)
        return rows
