"""Graphs of decodes and graphs of steps with prompts: which steps fit, and the fixed buffers that hold their inputs."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.paged_attention import DeviceRows, PagedBatch
from ..forward import ModelInput
from ..placing.device import to_device


@dataclass(frozen=True)
class GraphLayout:
    """Properties that all captured steps of a set share.

    Args:
        num_columns, num_groups: width of block tables, and how many a request has.
        max_seq_len: most tokens of a request.
        like: a tensor ``[..., hidden size]`` with the dtype and device of hidden rows.
        has_adapters: (False, True) if steps may have adapters, for which separate graphs are captured; else (False,).
    """

    num_columns: int
    num_groups: int
    block_size: int
    max_seq_len: int
    like: Tensor
    has_adapters: tuple[bool, ...]


class _Buffers:
    """Inputs and result of steps of up to ``N`` tokens of up to ``B`` rows. Initially all are unused."""

    def __init__(self, num_tokens: int, num_rows: int, layout: GraphLayout) -> None:
        self._layout = layout
        self._new = partial(torch.zeros, dtype=torch.int64, device=layout.like.device)
        self._token_ids, self._positions = self._new(num_tokens), self._new(num_tokens)
        self._slots = self._new((layout.num_groups, num_tokens)) - 1
        self._tables = self._new((layout.num_groups, num_rows, layout.num_columns))
        self._token_lora = self._new(num_tokens) - 1
        self.hidden = layout.like.new_zeros(num_rows, layout.like.shape[-1])

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
        """Return tables and slots of the first group, and those of all if there are several, as a batch takes them."""
        tables, slots = self._tables[:, :num_rows], self._slots[:, :num_tokens]
        return tables[0], slots[0], (tables, slots) if len(tables) > 1 else ()

    def _fill_tokens(self, step: ModelInput, size: int) -> None:
        """Copy the tokens of ``step`` and their slots; mark the rest of the first ``size`` tokens unused."""
        batch, num_tokens = step.batch, len(step.token_ids)
        self._token_ids[:num_tokens].copy_(step.token_ids)
        self._positions[:num_tokens].copy_(step.positions)
        self._slots[:, :num_tokens].copy_(batch.slot_mapping if batch.group_slots is None else batch.group_slots)
        # Table columns beyond the width belong to no request.
        table = (batch.block_table if batch.group_tables is None else batch.group_tables)[..., : self._tables.shape[2]]
        self._tables[:, : table.shape[-2], : table.shape[-1]].copy_(table)
        if num_tokens < size:
            self._slots[:, num_tokens:size].fill_(-1)
        if step.token_lora is not None:
            self._token_lora[:num_tokens].copy_(step.token_lora)
            self._token_lora[num_tokens:size].fill_(-1)


class DecodeBuffers(_Buffers):
    """Buffers of steps in which each row has one token."""

    def __init__(self, num_rows: int, layout: GraphLayout) -> None:
        super().__init__(num_rows, num_rows, layout)
        self._seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=layout.like.device)
        self._logit_rows = torch.arange(num_rows, device=layout.like.device)

    def input_of(self, size: int, *, has_adapters: bool) -> ModelInput:
        """Return the first ``size`` rows as a step."""
        layout = self._layout
        table, slots, of_groups = self._of_groups(size, size)
        batch = PagedBatch.captured_decode(
            table, slots, self._seq_lens[:size], layout.max_seq_len, layout.block_size, *of_groups
        )
        return self._input_of(size, self._logit_rows[:size], batch, has_adapters=has_adapters)

    def fill(self, step: ModelInput, size: int) -> None:
        """Copy the rows of ``step``, all decodes; mark the rest of the first ``size`` rows unused."""
        self._fill_tokens(step, size)
        num_rows = len(step.token_ids)
        self._seq_lens[:num_rows].copy_(step.batch.device_rows.seq_lens)
        if num_rows < size:
            self._seq_lens[num_rows:size].zero_()


class PromptBuffers(_Buffers):
    """Buffers of steps in which some rows have several tokens."""

    def __init__(self, num_tokens: int, num_rows: int, layout: GraphLayout) -> None:
        super().__init__(num_tokens, num_rows, layout)
        # Row starts, their lengths, and those of decodes, in one tensor for a single copy.
        self._rows = torch.zeros(3, num_rows + 1, dtype=torch.int32, device=layout.like.device)
        self._rows[2] = -1
        self._logit_rows = self._new(num_rows)

    def input_of(self, num_tokens: int, num_rows: int, *, has_adapters: bool) -> ModelInput:
        """Return the first ``num_tokens`` tokens and ``num_rows`` rows as a step."""
        table, slots, of_groups = self._of_groups(num_tokens, num_rows)
        starts, seq_lens, decode_lens = self._rows
        rows = DeviceRows(
            starts[: num_rows + 1],
            seq_lens[:num_rows],
            num_tokens,
            self._layout.max_seq_len,
            decode_lens[:num_rows],
        )
        batch = PagedBatch.captured_rows(table, slots, rows, self._layout.block_size, *of_groups)
        return self._input_of(num_tokens, self._logit_rows[:num_rows], batch, has_adapters=has_adapters)

    def fill(self, step: ModelInput, size: int) -> None:
        """Copy ``step``, which has no more logits than rows; mark the rest of the first ``size`` tokens unused."""
        self._fill_tokens(step, size)
        self._rows.copy_(to_device(self._rows_of(step.batch), self._rows.device))
        # Logits of the other rows are not used, but their tokens must exist.
        self._logit_rows.zero_()
        self._logit_rows[: len(step.logit_rows)].copy_(step.logit_rows)

    def _rows_of(self, batch: PagedBatch) -> NDArray[np.int32]:
        """Return the content of ``_rows`` for ``batch``; an unused row begins where the last one ends."""
        num_rows = len(batch.query_lens)
        query_lens, seq_lens = np.asarray(batch.query_lens), np.asarray(batch.seq_lens)
        rows = np.zeros(self._rows.shape, np.int32)
        rows[0, 1 : num_rows + 1] = query_lens.cumsum()
        rows[0, num_rows + 1 :] = batch.num_tokens
        rows[1, :num_rows] = seq_lens
        rows[2] = -1
        rows[2, :num_rows] = np.where(query_lens == 1, seq_lens, -1)
        return rows


# capture(step, out): record the computation that writes the hidden rows of ``step`` into ``out``; return a callable
# that repeats it.
Capture = Callable[[ModelInput, Tensor], Callable[[], None]]


class DecodeGraphs:
    """Graphs of steps in which each row has one token.

    Args:
        sizes: numbers of rows, ascending.
    """

    def __init__(self, sizes: tuple[int, ...], layout: GraphLayout, capture: Capture) -> None:
        self._sizes = sizes
        self._buffers = DecodeBuffers(sizes[-1], layout)
        self._replays = {
            (size, has_adapters): capture(
                self._buffers.input_of(size, has_adapters=has_adapters), self._buffers.hidden[:size]
            )
            for size, has_adapters in itertools.product(reversed(sizes), layout.has_adapters)
        }

    def __len__(self) -> int:
        return len(self._replays)

    def replay(self, step: ModelInput) -> Tensor | None:
        """Return the input of the head, ``[R, hidden size]``, valid until the next replay; None if no graph fits."""
        num_rows = len(step.batch.query_lens)
        place = bisect_left(self._sizes, num_rows)
        if place == len(self._sizes) or step.batch.num_decodes < num_rows:
            return None
        size = self._sizes[place]
        self._buffers.fill(step, size)
        self._replays[size, step.token_lora is not None]()
        is_whole = len(step.logit_rows) == num_rows
        return self._buffers.hidden[:num_rows] if is_whole else self._buffers.hidden[step.logit_rows]


class PromptGraphs:
    """Graphs of steps in which some rows have several tokens, with causal attention.

    Args:
        token_sizes, row_sizes: numbers of tokens and of rows, ascending; every combination is captured.
    """

    def __init__(
        self, token_sizes: tuple[int, ...], row_sizes: tuple[int, ...], layout: GraphLayout, capture: Capture
    ) -> None:
        self._token_sizes, self._row_sizes = token_sizes, row_sizes
        self._buffers = PromptBuffers(token_sizes[-1], row_sizes[-1], layout)
        self._replays = {
            (num_tokens, num_rows, has_adapters): capture(
                self._buffers.input_of(num_tokens, num_rows, has_adapters=has_adapters),
                self._buffers.hidden[:num_rows],
            )
            for num_tokens, num_rows, has_adapters in itertools.product(
                reversed(token_sizes), reversed(row_sizes), layout.has_adapters
            )
        }

    def __len__(self) -> int:
        return len(self._replays)

    def replay(self, step: ModelInput) -> Tensor | None:
        """Return the same as ``DecodeGraphs.replay``."""
        num_logits = len(step.logit_rows)
        tokens = bisect_left(self._token_sizes, len(step.token_ids))
        rows = bisect_left(self._row_sizes, max(len(step.batch.query_lens), num_logits))
        is_too_large = tokens == len(self._token_sizes) or rows == len(self._row_sizes)
        if is_too_large or step.batch.visible_ends is not None:
            return None
        size = self._token_sizes[tokens]
        self._buffers.fill(step, size)
        self._replays[size, self._row_sizes[rows], step.token_lora is not None]()
        return self._buffers.hidden[:num_logits]
