"""Where captured steps find their inputs: tensors that stay where they are."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .....kernels.paged_attention import DeviceRows, PagedBatch
from ...forward import ModelInput
from ...to_device import to_device


class DecodeBuffers:
    """Inputs and result of decodes of up to ``N`` rows. At first no row is in use.

    Args:
        num_columns: of the block table.
        like: a tensor ``[..., hidden size]`` of the result's dtype and device.
        num_groups: how many block tables a request has.
    """

    def __init__(self, num_rows: int, num_columns: int, like: Tensor, num_groups: int = 1) -> None:
        new = partial(torch.zeros, dtype=torch.int64, device=like.device)
        self._token_ids, self._positions = new(num_rows), new(num_rows)
        self._slots = new((num_groups, num_rows)) - 1
        self._tables = new((num_groups, num_rows, num_columns))
        self._seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=like.device)
        self._logit_rows = torch.arange(num_rows, device=like.device)
        self._token_lora = new(num_rows) - 1
        self.hidden = like.new_zeros(num_rows, like.shape[-1])

    def input_of(self, size: int, max_seq_len: int, block_size: int, *, has_adapters: bool) -> ModelInput:
        """The first ``size`` rows as a step whose requests have at most ``max_seq_len`` tokens."""
        tables, slots = self._tables[:, :size], self._slots[:, :size]
        of_groups = (tables, slots) if len(tables) > 1 else ()
        return ModelInput(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            logit_rows=self._logit_rows[:size],
            batch=PagedBatch.captured_decode(
                tables[0], slots[0], self._seq_lens[:size], max_seq_len, block_size, *of_groups
            ),
            state_slots=np.zeros(size, np.int64),
            token_lora=self._token_lora[:size] if has_adapters else None,
        )

    def fill(self, step: ModelInput, size: int) -> None:
        """Copy the rows of ``step``, all decodes; the others of the first ``size`` are not in use then."""
        batch, num_rows = step.batch, len(step.token_ids)
        self._token_ids[:num_rows].copy_(step.token_ids)
        self._positions[:num_rows].copy_(step.positions)
        _copy_places(batch, self._tables, self._slots, num_rows)
        self._seq_lens[:num_rows].copy_(batch.device_rows.seq_lens)
        if step.token_lora is not None:
            self._token_lora[:num_rows].copy_(step.token_lora)
            self._token_lora[num_rows:size].fill_(-1)
        if num_rows < size:
            self._slots[:, num_rows:size].fill_(-1)
            self._seq_lens[num_rows:size].zero_()


class PromptBuffers:
    """Inputs and result of steps of up to ``N`` tokens of up to ``B`` rows, of which some have several tokens.

    Args: as of ``DecodeBuffers``.
    """

    def __init__(self, num_tokens: int, num_rows: int, num_columns: int, like: Tensor, num_groups: int = 1) -> None:
        new = partial(torch.zeros, dtype=torch.int64, device=like.device)
        self._token_ids, self._positions = new(num_tokens), new(num_tokens)
        self._slots = new((num_groups, num_tokens)) - 1
        self._tables = new((num_groups, num_rows, num_columns))
        # Where rows begin, their lengths, and those of decodes; one copy brings all.
        self._rows = torch.zeros(3, num_rows + 1, dtype=torch.int32, device=like.device)
        self._rows[2] = -1
        self._logit_rows = new(num_rows)
        self._token_lora = new(num_tokens) - 1
        self.hidden = like.new_zeros(num_rows, like.shape[-1])

    def input_of(
        self, num_tokens: int, num_rows: int, max_seq_len: int, block_size: int, *, has_adapters: bool
    ) -> ModelInput:
        """The first ``num_tokens`` tokens and ``num_rows`` rows, of at most ``max_seq_len`` tokens each, as a step."""
        tables, slots = self._tables[:, :num_rows], self._slots[:, :num_tokens]
        of_groups = (tables, slots) if len(tables) > 1 else ()
        starts, seq_lens, decode_lens = self._rows
        rows = DeviceRows(starts[: num_rows + 1], seq_lens[:num_rows], num_tokens, max_seq_len, decode_lens[:num_rows])
        return ModelInput(
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            logit_rows=self._logit_rows[:num_rows],
            batch=PagedBatch.captured_rows(tables[0], slots[0], rows, block_size, *of_groups),
            state_slots=np.zeros(num_rows, np.int64),
            token_lora=self._token_lora[:num_tokens] if has_adapters else None,
        )

    def fill(self, step: ModelInput, size: int) -> None:
        """Copy ``step``, of no more logits than rows; the others of the first ``size`` tokens are not in use then."""
        batch, num_tokens = step.batch, len(step.token_ids)
        self._token_ids[:num_tokens].copy_(step.token_ids)
        self._positions[:num_tokens].copy_(step.positions)
        _copy_places(batch, self._tables, self._slots, num_tokens)
        self._slots[:, num_tokens:size].fill_(-1)
        self._rows.copy_(to_device(self._rows_of(batch), self._rows.device))
        # The others' logits nobody asks for, but the tokens must be there.
        self._logit_rows.zero_()
        self._logit_rows[: len(step.logit_rows)].copy_(step.logit_rows)
        if step.token_lora is not None:
            self._token_lora[:num_tokens].copy_(step.token_lora)
            self._token_lora[num_tokens:size].fill_(-1)

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


def _copy_places(batch: PagedBatch, tables: Tensor, slots: Tensor, num_tokens: int) -> None:
    """Copy the blocks of the rows of ``batch`` and the slots of its tokens, of each group."""
    own_slots = batch.slot_mapping if batch.group_slots is None else batch.group_slots
    own_tables = batch.block_table if batch.group_tables is None else batch.group_tables
    slots[:, :num_tokens].copy_(own_slots)
    # What a table has beyond is of no request.
    table = own_tables[..., : tables.shape[2]]
    tables[:, : table.shape[-2], : table.shape[-1]].copy_(table)
