"""Graphs of decodes and graphs of steps with prompts: which steps fit, and the fixed buffers that hold their inputs."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.paged_attention import DeviceRows, PagedBatch
from ..forward import ModelInput
from ..placing.device import host_array, to_device

_INDEX_TENSORS = ("token_ids", "positions", "logit_rows", "token_lora", "token_types")
# Of the first bytes of tensors.
_ALIGNMENT = 16


@dataclass(frozen=True)
class GraphLayout:
    """Properties that all captured steps of a set share.

    Args:
        num_columns, num_groups: width of block tables, and how many a request has.
        max_seq_len: most tokens of a request.
        max_fed_tokens: most tokens that a step samples.
        like: a tensor ``[..., hidden size]`` with the dtype and device of hidden rows.
        has_adapters: (False, True) if steps may have adapters, for which separate graphs are captured; else (False,).
    """

    num_columns: int
    num_groups: int
    block_size: int
    max_seq_len: int
    max_fed_tokens: int
    like: Tensor
    has_adapters: tuple[bool, ...]


class _Inputs:
    """Tensors at fixed addresses on a device, whose contents come from the host in one copy.

    A copy of its own for each of them would take the host as long as the launch of a graph.

    Args:
        shapes: of the tensors, by name.
        num_table_entries: most numbers of the block tables of a step, which follow the tensors in the copy.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], num_table_entries: int, device: torch.device
    ) -> None:
        self._shapes = {
            name: (shape, torch.zeros(0, dtype=dtype).numpy().dtype) for name, (shape, dtype) in shapes.items()
        }
        sizes = [_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in shapes.values()]
        self._begins = dict(zip(shapes, itertools.accumulate(sizes, initial=0), strict=False))
        self._num_bytes = sum(sizes)
        self._memory = torch.zeros(
            self._num_bytes + num_table_entries * torch.int64.itemsize, dtype=torch.uint8, device=device
        )
        self.tensors = {
            name: self._memory[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for (name, begin), (shape, dtype) in zip(self._begins.items(), shapes.values(), strict=True)
        }

    def mark_unused(self) -> None:
        """Set all tensors to 0."""
        self._memory.zero_()

    def copy(self, table: NDArray[Any], write: Callable[[dict[str, NDArray[Any]]], None]) -> Tensor:
        """Copy arrays that ``write`` fills, by the tensors' names, and return a copy of ``table`` on the device.

        It is valid until the next call.
        """
        # Torch reuses a pinned buffer when the event after its last copy has passed, however many steps are in flight.
        is_pinned = self._memory.device.type == "cuda"
        num_bytes = self._num_bytes + table.size * torch.int64.itemsize
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        host = memory.numpy()
        write(
            {
                name: host[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
                for (name, begin), (shape, dtype) in zip(self._begins.items(), self._shapes.values(), strict=True)
            }
        )
        host[self._num_bytes :].view(np.int64).reshape(table.shape)[...] = table
        self._memory[:num_bytes].copy_(memory, non_blocking=True)
        return self._memory[self._num_bytes : num_bytes].view(torch.int64).view(table.shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class _Buffers:
    """Inputs and result of steps of up to ``N`` tokens of up to ``B`` rows. Initially all are unused.

    Args:
        shapes: of further inputs, by name.
    """

    def __init__(
        self,
        num_tokens: int,
        num_rows: int,
        layout: GraphLayout,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    ) -> None:
        self._layout = layout
        device, num_groups = layout.like.device, layout.num_groups
        of_tokens = dict.fromkeys(("token_ids", "positions", "token_lora"), ((num_tokens,), torch.int64))
        self._inputs = _Inputs(
            {**of_tokens, "slots": ((num_groups, num_tokens), torch.int64), **shapes},
            num_groups * num_rows * layout.num_columns,
            device,
        )
        self._tables = torch.zeros((num_groups, num_rows, layout.num_columns), dtype=torch.int64, device=device)
        # Tokens of the step before are at the end, where indices count from.
        self._fed_tokens = torch.zeros(layout.max_fed_tokens, dtype=torch.int64, device=device)
        self.hidden = layout.like.new_zeros(num_rows, layout.like.shape[-1])
        self.mark_unused()

    def mark_unused(self) -> None:
        """Mark all tokens and rows unused."""
        self._inputs.mark_unused()
        self._tables.zero_()
        for name in ("slots", "token_lora"):
            self._inputs.tensors[name].fill_(-1)

    def _input_of(self, num_tokens: int, logit_rows: Tensor, batch: PagedBatch, *, has_adapters: bool) -> ModelInput:
        tensors = self._inputs.tensors
        return ModelInput(
            token_ids=tensors["token_ids"][:num_tokens],
            positions=tensors["positions"][:num_tokens],
            logit_rows=logit_rows,
            batch=batch,
            state_slots=np.zeros(len(logit_rows), np.int64),
            token_lora=tensors["token_lora"][:num_tokens] if has_adapters else None,
            fed_tokens=self._fed_tokens,
        )

    def _of_groups(self, num_tokens: int, num_rows: int) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return tables and slots of the first group, and those of all if there are several, as a batch takes them."""
        tables, slots = self._tables[:, :num_rows], self._inputs.tensors["slots"][:, :num_tokens]
        return tables[0], slots[0], (tables, slots) if len(tables) > 1 else ()

    def fill(self, step: ModelInput, size: int) -> None:
        """Copy ``step``, which has no more logits than rows; mark the rest of the first ``size`` tokens unused."""
        batch = step.batch
        # Table columns beyond the width belong to no request.
        table = host_array(batch.block_table if batch.group_tables is None else batch.group_tables)
        table = table.reshape(-1, *table.shape[-2:])[..., : self._tables.shape[2]]
        staged = self._inputs.copy(table, partial(self._write, step, size))
        self._tables[:, : table.shape[1], : table.shape[2]].copy_(staged)
        if step.fed_tokens is not None:
            self._fed_tokens[-len(step.fed_tokens) :].copy_(step.fed_tokens)

    def _write(self, step: ModelInput, size: int, arrays: dict[str, NDArray[Any]]) -> None:
        """Write the tokens of ``step`` and their slots into the arrays of all inputs."""
        batch, num_tokens = step.batch, len(step.token_ids)
        slots = batch.slot_mapping if batch.group_slots is None else batch.group_slots
        values = {"token_ids": step.token_ids, "positions": step.positions, "slots": slots}
        if step.token_lora is not None:
            values["token_lora"] = step.token_lora
        for name, value in values.items():
            arrays[name][..., :num_tokens] = host_array(value)
            # An unused token has an id and a position that exist, and no slot and no adapter.
            arrays[name][..., num_tokens:size] = 0 if name in ("token_ids", "positions") else -1


class DecodeBuffers(_Buffers):
    """Buffers of steps in which each row has one token."""

    def __init__(self, num_rows: int, layout: GraphLayout) -> None:
        super().__init__(num_rows, num_rows, layout, {"seq_lens": ((num_rows,), torch.int32)})
        self._logit_rows = torch.arange(num_rows, device=layout.like.device)

    def input_of(self, size: int, *, has_adapters: bool) -> ModelInput:
        """Return the first ``size`` rows as a step."""
        layout = self._layout
        table, slots, of_groups = self._of_groups(size, size)
        seq_lens = self._inputs.tensors["seq_lens"][:size]
        batch = PagedBatch.captured_decode(table, slots, seq_lens, layout.max_seq_len, layout.block_size, *of_groups)
        return self._input_of(size, self._logit_rows[:size], batch, has_adapters=has_adapters)

    def _write(self, step: ModelInput, size: int, arrays: dict[str, NDArray[Any]]) -> None:
        super()._write(step, size, arrays)
        num_rows = len(step.batch.seq_lens)
        arrays["seq_lens"][:num_rows] = step.batch.seq_lens
        arrays["seq_lens"][num_rows:] = 0


class PromptBuffers(_Buffers):
    """Buffers of steps in which some rows have several tokens."""

    def __init__(self, num_tokens: int, num_rows: int, layout: GraphLayout) -> None:
        # Row starts, their lengths, and those of decodes.
        shapes = {"rows": ((3, num_rows + 1), torch.int32), "logit_rows": ((num_rows,), torch.int64)}
        super().__init__(num_tokens, num_rows, layout, shapes)

    def mark_unused(self) -> None:
        super().mark_unused()
        self._inputs.tensors["rows"][2] = -1

    def input_of(self, num_tokens: int, num_rows: int, *, has_adapters: bool) -> ModelInput:
        """Return the first ``num_tokens`` tokens and ``num_rows`` rows as a step."""
        table, slots, of_groups = self._of_groups(num_tokens, num_rows)
        starts, seq_lens, decode_lens = self._inputs.tensors["rows"]
        rows = DeviceRows(
            starts[: num_rows + 1],
            seq_lens[:num_rows],
            num_tokens,
            self._layout.max_seq_len,
            decode_lens[:num_rows],
        )
        batch = PagedBatch.captured_rows(table, slots, rows, self._layout.block_size, *of_groups)
        logit_rows = self._inputs.tensors["logit_rows"][:num_rows]
        return self._input_of(num_tokens, logit_rows, batch, has_adapters=has_adapters)

    def _write(self, step: ModelInput, size: int, arrays: dict[str, NDArray[Any]]) -> None:
        super()._write(step, size, arrays)
        _write_rows(arrays["rows"], step.batch)
        # Logits of the other rows are not used, but their tokens must exist.
        arrays["logit_rows"][:] = 0
        arrays["logit_rows"][: len(step.logit_rows)] = host_array(step.logit_rows)


def _write_rows(rows: NDArray[Any], batch: PagedBatch) -> None:
    """Write starts and lengths of the rows of ``batch``; an unused row begins where the last one ends."""
    num_rows = len(batch.query_lens)
    query_lens, seq_lens = np.asarray(batch.query_lens), np.asarray(batch.seq_lens)
    rows[0, 0] = 0
    rows[0, 1 : num_rows + 1] = query_lens.cumsum()
    rows[0, num_rows + 1 :] = batch.num_tokens
    rows[1, :num_rows], rows[1, num_rows:] = seq_lens, 0
    rows[2, :num_rows], rows[2, num_rows:] = np.where(query_lens == 1, seq_lens, -1), -1


# Numbers of a graph: rows, or tokens and rows.
Size = tuple[int, ...]
# A size, and whether tokens may have adapters.
_Key = tuple[Size, bool]
# capture(step, out): record the computation that writes the hidden rows of ``step`` into ``out``; return a callable
# that repeats it.
Capture = Callable[[ModelInput, Tensor], Callable[[], None]]


class StepGraphs(ABC):
    """Graphs of one kind of steps, by size. A step takes the smallest graph that it fits.

    Args:
        first: sizes to capture now, and ``later`` those for ``capture_next``; each in the order of capture.
        buffers: of the largest size.
    """

    def __init__(
        self, first: Iterable[Size], later: Iterable[Size], buffers: _Buffers, layout: GraphLayout, capture: Capture
    ) -> None:
        self._buffers = buffers
        self._capture_of = capture
        self._replays: dict[_Key, Callable[[], None]] = {}
        # How many steps would have taken each graph that is missing.
        self._wishes = dict.fromkeys(itertools.product(later, layout.has_adapters), 0)
        for key in itertools.product(first, layout.has_adapters):
            self._replays[key] = self._capture(*key)

    def __len__(self) -> int:
        return len(self._replays)

    @property
    def num_uncaptured(self) -> int:
        return len(self._wishes)

    @property
    def num_wishes(self) -> int:
        """Number of steps that would have taken the missing graph that most of them would have taken; -1 if none is
        missing.
        """
        return max(self._wishes.values(), default=-1)

    def capture_next(self) -> None:
        """Capture the missing graph that most steps would have taken; of equal ones the first."""
        key = max(self._wishes, key=self._wishes.__getitem__)
        # A capture also runs the step, and the last step's blocks may belong to other requests now.
        self._buffers.mark_unused()
        self._replays[key] = self._capture(*key)
        del self._wishes[key]

    def forget_missing(self) -> None:
        """Capture no further graphs."""
        self._wishes.clear()

    @abstractmethod
    def _capture(self, size: Size, has_adapters: bool) -> Callable[[], None]:
        """Capture a graph; return its replay."""

    def _fitting(self, sizes: Iterable[Size], *, has_adapters: bool) -> Size | None:
        """Return the first of ``sizes`` that was captured, and record that a missing first one is asked for; None if
        none was captured.
        """
        ascending = iter(sizes)
        best = next(ascending, None)
        if best is None or (best, has_adapters) in self._replays:
            return best
        if (best, has_adapters) in self._wishes:
            self._wishes[best, has_adapters] += 1
        return next((size for size in ascending if (size, has_adapters) in self._replays), None)


class DecodeGraphs(StepGraphs):
    """Graphs of steps in which each row has one token.

    Args:
        sizes: numbers of rows, ascending.
        first: those of them to capture now, with the largest.
    """

    _buffers: DecodeBuffers

    def __init__(self, sizes: Sequence[int], first: Container[int], layout: GraphLayout, capture: Capture) -> None:
        self._sizes = sizes
        now = [(size,) for size in reversed(sizes) if size in first]
        later = [(size,) for size in reversed(sizes) if size not in first]
        super().__init__(now, later, DecodeBuffers(sizes[-1], layout), layout, capture)

    def _capture(self, size: Size, has_adapters: bool) -> Callable[[], None]:
        (num_rows,) = size
        step = self._buffers.input_of(num_rows, has_adapters=has_adapters)
        return self._capture_of(step, self._buffers.hidden[:num_rows])

    def replay(self, step: ModelInput) -> Tensor | None:
        """Return the input of the head, ``[R, hidden size]``, valid until the next replay; None if no graph fits."""
        num_rows = len(step.batch.query_lens)
        if step.batch.num_decodes < num_rows:
            return None
        has_adapters = step.token_lora is not None
        larger = ((size,) for size in self._sizes[bisect_left(self._sizes, num_rows) :])
        size = self._fitting(larger, has_adapters=has_adapters)
        if size is None:
            return None
        self._buffers.fill(step, size[0])
        self._replays[size, has_adapters]()
        if len(step.logit_rows) == num_rows:
            return self._buffers.hidden[:num_rows]
        return self._buffers.hidden[to_device(host_array(step.logit_rows), self._buffers.hidden.device)]


class PromptGraphs(StepGraphs):
    """Graphs of steps in which some rows have several tokens, with causal attention.

    Args:
        token_sizes, row_sizes: numbers of tokens and of rows, ascending; every combination is captured.
        first: numbers of tokens for which to capture the largest number of rows now, with the largest.
    """

    _buffers: PromptBuffers

    def __init__(
        self,
        token_sizes: Sequence[int],
        row_sizes: Sequence[int],
        first: Container[int],
        layout: GraphLayout,
        capture: Capture,
    ) -> None:
        self._token_sizes, self._row_sizes = token_sizes, row_sizes
        all_sizes = list(itertools.product(reversed(token_sizes), reversed(row_sizes)))
        now = [size for size in all_sizes if size[0] in first and size[1] == row_sizes[-1]]
        later = [size for size in all_sizes if size not in now]
        super().__init__(now, later, PromptBuffers(token_sizes[-1], row_sizes[-1], layout), layout, capture)

    def _capture(self, size: Size, has_adapters: bool) -> Callable[[], None]:
        step = self._buffers.input_of(*size, has_adapters=has_adapters)
        return self._capture_of(step, self._buffers.hidden[: size[1]])

    def replay(self, step: ModelInput) -> Tensor | None:
        """Return the same as ``DecodeGraphs.replay``."""
        num_logits, has_adapters = len(step.logit_rows), step.token_lora is not None
        tokens = bisect_left(self._token_sizes, len(step.token_ids))
        rows = bisect_left(self._row_sizes, max(len(step.batch.query_lens), num_logits))
        if step.batch.visible_ends is not None:
            return None
        larger = itertools.product(self._token_sizes[tokens:], self._row_sizes[rows:])
        size = self._fitting(larger, has_adapters=has_adapters)
        if size is None:
            return None
        self._buffers.fill(step, size[0])
        self._replays[size, has_adapters]()
        return self._buffers.hidden[:num_logits]


def on_device(step: ModelInput, device: torch.device) -> ModelInput:
    """Return ``step`` with its index tensors on ``device`` and its token ids known, without waiting for it."""
    if step.token_ids.device == device:
        return step.with_fed_tokens()

    def move(tensor: Tensor | None) -> Any:
        return None if tensor is None else to_device(tensor.numpy(), device)

    batch = step.batch
    moved = {name: move(getattr(step, name)) for name in _INDEX_TENSORS}
    moved["batch"] = PagedBatch(
        move(batch.block_table),
        move(batch.slot_mapping),
        batch.query_lens,
        batch.seq_lens,
        batch.block_size,
        visible_ends=move(batch.visible_ends),
        group_tables=move(batch.group_tables),
        group_slots=move(batch.group_slots),
    )
    return replace(step, **moved).with_fed_tokens()
