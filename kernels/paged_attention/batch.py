"""Requests of one packed forward, and the slots of their tokens in the paged cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..dispatch import KernelInputError

# rule(batch_index, head_index, query_positions, key_positions) -> bool tensor, like transformers' mask functions.
MaskRule = Callable[[int, int, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DeviceRows:
    """Rows of a batch, in the form for kernels on a GPU.

    Args:
        query_starts: ``[B + 1]`` int32 on the device; row ``b`` begins at packed token ``query_starts[b]``.
        seq_lens: ``[B]`` int32 on the device.
        max_query_len, max_seq_len: upper bounds over all rows, which determine grids and splits.
        decode_lens: ``[B]`` int32 on the device, ``seq_lens`` of the rows with one query token and -1 for all others;
            None if the host knows which rows are decodes.
    """

    query_starts: Tensor
    seq_lens: Tensor
    max_query_len: int
    max_seq_len: int
    decode_lens: Tensor | None = None


class PagedBatch:
    """Batch of one step, built once and read by every layer.

    Row ``b`` is a request with ``query_lens[b]`` tokens in the packed axis; they are the last of its
    ``seq_lens[b]`` tokens. Rows with one query token come first (decodes), then the others (prefill chunks).

    Args:
        block_table: ``[B, MB]`` int32 or int64; entries past a row's last block are not read.
        slot_mapping: ``[T]``, the cache slot of each packed token.
        query_lens: tokens of each row in this forward, at least 1.
        seq_lens: tokens of each row that are in the cache once this forward has stored its own.
        block_size: tokens per block.
        device_rows: the same rows on the device, if the caller has them; else they are copied at the first access.
        visible_ends: ``[T]``, end of the positions that each token sees of its request, on the device of the block
            table; None if no token sees beyond itself. Tokens that see each other have the same end, at most their
            row's ``seq_len``. Not read for rows with one token.
        group_tables, group_slots: ``[G, B, MB]`` and ``[G, T]``, blocks and slots of each group of layers; the first
            are ``block_table`` and ``slot_mapping``. None if all layers share these.

    Raises:
        KernelInputError: a decode row follows a prefill row.
    """

    def __init__(
        self,
        block_table: Tensor,
        slot_mapping: Tensor,
        query_lens: list[int],
        seq_lens: list[int],
        block_size: int,
        device_rows: DeviceRows | None = None,
        visible_ends: Tensor | None = None,
        group_tables: Tensor | None = None,
        group_slots: Tensor | None = None,
    ) -> None:
        self.block_table = block_table
        self.slot_mapping = slot_mapping
        self.query_lens = query_lens
        self.seq_lens = seq_lens
        self.block_size = block_size
        self.visible_ends = visible_ends
        self.num_tokens = sum(query_lens)
        self.num_decodes = query_lens.count(1)
        if 1 in query_lens[self.num_decodes :]:
            raise KernelInputError(f"decode rows must come first, got query_lens {query_lens}")
        self.group_tables = group_tables
        self.group_slots = group_slots
        self._device_rows = device_rows
        self._derived: dict[Hashable, Any] = {}

    def for_group(self, group: int) -> PagedBatch:
        """Return the same rows with the blocks of a group of layers, built once per group.

        Raises:
            KernelInputError: the batch has the blocks of a single group.
        """
        if self.group_tables is None or self.group_slots is None:
            if group:
                raise KernelInputError(f"a layer of group {group} cannot attend in a batch with one block table")
            return self
        tables, slots = self.group_tables, self.group_slots
        return self.derived(("group", group), lambda: _GroupBatch(self, tables[group], slots[group]))

    @classmethod
    def captured_decode(
        cls,
        block_table: Tensor,
        slot_mapping: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        block_size: int,
        group_tables: Tensor | None = None,
        group_slots: Tensor | None = None,
    ) -> PagedBatch:
        """Return a batch with one token per row to capture a CUDA graph. Its tensors are rewritten before each replay.

        Only kernels on a GPU may compute it, because its lists of lengths hold upper bounds.

        Args:
            block_table: ``[B, MB]``; not read for an unused row.
            slot_mapping: ``[B]``; negative for an unused row.
            seq_lens: ``[B]`` int32 on the device; 0 for an unused row, whose result is zeros.
            max_seq_len: upper bound of ``seq_lens`` in all replays.
            group_tables, group_slots: as for any batch.
        """
        num_rows = seq_lens.shape[0]
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=seq_lens.device)
        rows = DeviceRows(starts, seq_lens, 1, max_seq_len)
        lens = [1] * num_rows, [max_seq_len] * num_rows
        groups = {"group_tables": group_tables, "group_slots": group_slots}
        return cls(block_table, slot_mapping, *lens, block_size, rows, **groups)

    @classmethod
    def captured_rows(
        cls,
        block_table: Tensor,
        slot_mapping: Tensor,
        device_rows: DeviceRows,
        block_size: int,
        group_tables: Tensor | None = None,
        group_slots: Tensor | None = None,
    ) -> PagedBatch:
        """Return a batch as ``captured_decode`` does, but with any number of consecutive tokens per row.

        Args:
            block_table: ``[B, MB]``; not read for an unused row.
            slot_mapping: ``[T]``; negative for an unused token, whose result is zeros.
            device_rows: with ``decode_lens``. An unused row begins at the end of the last row, has a ``seq_len`` of 0
                and is not among the decodes.
            group_tables, group_slots: as for any batch.

        Raises:
            KernelInputError: ``decode_lens`` is None, or there is only one token, which is a decode.
        """
        num_rows, num_tokens = len(block_table), len(slot_mapping)
        if device_rows.decode_lens is None or num_tokens < 2:
            raise KernelInputError(f"captured rows need decode_lens and at least two tokens, got {num_tokens}")
        lens = [num_tokens, *[0] * (num_rows - 1)], [device_rows.max_seq_len] * num_rows
        groups = {"group_tables": group_tables, "group_slots": group_slots}
        return cls(block_table, slot_mapping, *lens, block_size, device_rows, **groups)

    @property
    def device(self) -> torch.device:
        """Device of the index tensors."""
        return self.block_table.device

    @property
    def device_rows(self) -> DeviceRows:
        """Rows in the form for kernels on a GPU, copied once for all layers of the step."""
        if self._device_rows is None:
            num_rows = len(self.query_lens)
            numbers = [*accumulate(self.query_lens, initial=0), *self.seq_lens]
            # Pinned, so that the copy does not wait for the device.
            pinned = torch.tensor(numbers, dtype=torch.int32, pin_memory=self.device.type == "cuda")
            on_device = pinned.to(self.device, non_blocking=True)
            self._device_rows = DeviceRows(
                on_device[: num_rows + 1], on_device[num_rows + 1 :], max(self.query_lens), max(self.seq_lens)
            )
        return self._device_rows

    @property
    def has_device_decodes(self) -> bool:
        """Whether only the device knows which rows are decodes."""
        return self._device_rows is not None and self._device_rows.decode_lens is not None

    @property
    def has_whole_prompts(self) -> bool:
        """Whether each row has all tokens of its request in this forward."""
        return self.query_lens == self.seq_lens

    def rows_and_positions(self) -> tuple[Tensor, Tensor]:
        """Return the row of each packed token and its position in the request, ``[T]`` int64 on the host."""
        query_lens, seq_lens = torch.tensor(self.query_lens), torch.tensor(self.seq_lens)
        row = torch.repeat_interleave(torch.arange(len(query_lens)), query_lens)
        return row, torch.arange(self.num_tokens) + (seq_lens - query_lens.cumsum(0))[row]

    def token_ends(self, row: Tensor, position: Tensor) -> Tensor:
        """Return the end of the positions that each token sees, ``[T]`` on the host, from ``rows_and_positions``."""
        if self.visible_ends is None:
            return position + 1
        has_several = torch.tensor(self.query_lens)[row] > 1
        return torch.where(has_several, self.visible_ends.cpu(), position + 1)

    def derived(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """Return the result of ``build``, cached under ``key`` for all layers of the step."""
        value = self._derived.get(key)
        if value is None:
            value = self._derived[key] = build()
        return value


class _GroupBatch(PagedBatch):
    """View of a batch for one group of layers."""

    def __init__(self, whole: PagedBatch, block_table: Tensor, slot_mapping: Tensor) -> None:
        lens = whole.query_lens, whole.seq_lens
        super().__init__(block_table, slot_mapping, *lens, whole.block_size, visible_ends=whole.visible_ends)
        self._whole = whole

    @property
    def device_rows(self) -> DeviceRows:
        """Rows of the whole batch, copied once for all groups."""
        return self._whole.device_rows

    @property
    def has_device_decodes(self) -> bool:
        return self._whole.has_device_decodes


@dataclass(frozen=True)
class Variant:
    """Arguments of ``paged_attention`` that belong to the model and not to the step; see there."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    mask_rule: MaskRule | None = None
    key_scale: float | Tensor = 1.0
    value_scale: float | Tensor = 1.0

    @property
    def cache_factors(self) -> tuple[float, float]:
        """Factors on the products with keys, and on the sums of values, of a float8 cache; 1 for another."""
        key, value = self.key_scale, self.value_scale
        return 1.0 if isinstance(key, Tensor) else key, 1.0 if isinstance(value, Tensor) else value

    @property
    def cache_scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Scales of the keys and values of an int8 cache; None for another."""
        key, value = self.key_scale, self.value_scale
        return key if isinstance(key, Tensor) else None, value if isinstance(value, Tensor) else None

    @property
    def has_plain_scores(self) -> bool:
        """Whether the softmax takes scaled scores without cap, sinks or ALiBi."""
        return self.softcap is None and self.sinks is None and self.alibi_slopes is None
