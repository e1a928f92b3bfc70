"""Encodes steps for the other ranks: the arrays of a step as bytes, and the changes of its block table.

A whole table is 2 MB at 512 requests of 16k tokens, so both ends store the table of the last step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.paged_attention import PagedBatch
from ...models.forward import ModelInput, VisionInputs
from ...models.placing.device import host_array, to_device
from .messages import RunStep, SightBytes

IntArray = NDArray[np.int64]
_SMALLEST_TABLE = (16, 16)


class _Table:
    """The block tables of all rows sent so far. It grows as needed."""

    def __init__(self) -> None:
        self.blocks = np.zeros(_SMALLEST_TABLE, np.int64)

    def grow(self, num_rows: int, width: int) -> None:
        rows, columns = self.blocks.shape
        if num_rows <= rows and width <= columns:
            return
        grown = np.zeros((_at_least(rows, num_rows), _at_least(columns, width)), np.int64)
        grown[:rows, :columns] = self.blocks
        self.blocks = grown


class StepSender:
    """Encodes steps as messages."""

    def __init__(self) -> None:
        self._table = _Table()

    def message_of(self, step: ModelInput) -> RunStep:
        """Encode ``step``. Every message must be sent, in order, because it contains changes since the last one."""
        slots, batch = np.asarray(step.state_slots, np.int64), step.batch
        table_rows, table = _rows_of_tables(slots, batch)
        width = table.shape[1]
        self._table.grow(int(table_rows.max()) + 1, width)
        rows, columns = np.nonzero(table != self._table.blocks[table_rows, :width])
        changed, blocks = table_rows[rows], table[rows, columns]
        self._table.blocks[changed, columns] = blocks
        return RunStep(
            token_ids=_bytes_of(step.token_ids),
            positions=_bytes_of(step.positions),
            logit_rows=_bytes_of(step.logit_rows),
            slot_mapping=_bytes_of(batch.slot_mapping if batch.group_slots is None else batch.group_slots),
            query_lens=np.array(batch.query_lens, np.int64).tobytes(),
            seq_lens=np.array(batch.seq_lens, np.int64).tobytes(),
            state_slots=slots.tobytes(),
            block_size=batch.block_size,
            table_width=width,
            changed_rows=changed.tobytes(),
            changed_columns=columns.astype(np.int64).tobytes(),
            changed_blocks=blocks.tobytes(),
            token_lora=None if step.token_lora is None else _bytes_of(step.token_lora),
            token_types=None if step.token_types is None else _bytes_of(step.token_types),
            embeds=None if step.inputs_embeds is None else _raw_bytes(step.inputs_embeds),
            embeds_dtype="" if step.inputs_embeds is None else _name_of(step.inputs_embeds.dtype),
            visible_ends=None if batch.visible_ends is None else _bytes_of(batch.visible_ends),
            num_groups=0 if batch.group_tables is None else len(batch.group_tables),
            sight=None if step.vision_inputs is None else _bytes_of_vision_inputs(step.vision_inputs),
        )


class StepReceiver:
    """Decodes messages to steps.

    Args:
        device: the device of the rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._table = _Table()

    def step_of(self, message: RunStep) -> ModelInput:
        """Decode ``message`` to a step with its tensors on this rank's device."""
        slots, columns = _ints(message.state_slots), _ints(message.changed_columns)
        self._table.grow((int(slots.max()) + 1) * max(1, message.num_groups), message.table_width)
        self._table.blocks[_ints(message.changed_rows), columns] = _ints(message.changed_blocks)
        token_ids = _ints(message.token_ids)
        batch = self._batch_of(message, slots)
        return ModelInput(
            token_ids=self._there(token_ids),
            positions=self._there(_ints(message.positions)),
            logit_rows=self._there(_ints(message.logit_rows)),
            batch=batch,
            state_slots=slots,
            inputs_embeds=self._embeds(message, len(token_ids)),
            token_lora=None if message.token_lora is None else self._there(_ints(message.token_lora)),
            token_types=None if message.token_types is None else self._there(_ints(message.token_types)),
            vision_inputs=None if message.sight is None else self._sight(message.sight),
        )

    def _batch_of(self, message: RunStep, slots: IntArray) -> PagedBatch:
        lens = _ints(message.query_lens).tolist(), _ints(message.seq_lens).tolist(), message.block_size
        ends = None if message.visible_ends is None else self._there(_ints(message.visible_ends))
        slot_mapping, width = _ints(message.slot_mapping), message.table_width
        if not message.num_groups:
            return PagedBatch(
                self._there(self._table.blocks[slots, :width]), self._there(slot_mapping), *lens, visible_ends=ends
            )
        rows = slots * message.num_groups + np.arange(message.num_groups)[:, None]
        tables = self._there(self._table.blocks[rows, :width])
        group_slots = self._there(slot_mapping.reshape(message.num_groups, -1))
        return PagedBatch(
            tables[0], group_slots[0], *lens, visible_ends=ends, group_tables=tables, group_slots=group_slots
        )

    def _there(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self._device)

    def _embeds(self, message: RunStep, num_tokens: int) -> Tensor | None:
        return None if message.embeds is None else self._rows(message.embeds, message.embeds_dtype, num_tokens)

    def _sight(self, sent: SightBytes) -> VisionInputs:
        axes = None if sent.axes is None else self._there(_ints(sent.axes).reshape(3, -1))
        if sent.places is None:
            return VisionInputs(axes)
        places = _ints(sent.places)
        deeper = tuple(self._rows(level, sent.dtype, len(places)) for level in sent.deeper)
        return VisionInputs(axes, self._there(places), deeper)

    def _rows(self, data: bytes, dtype: str, num_rows: int) -> Tensor:
        flat = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
        return flat.view(num_rows, -1).to(self._device)


def _bytes_of_vision_inputs(inputs: VisionInputs) -> SightBytes:
    return SightBytes(
        None if inputs.axes is None else _bytes_of(inputs.axes),
        None if inputs.places is None else _bytes_of(inputs.places),
        tuple(_raw_bytes(level) for level in inputs.deeper),
        _name_of(inputs.deeper[0].dtype) if inputs.deeper else "",
    )


def _rows_of_tables(slots: IntArray, batch: PagedBatch) -> tuple[IntArray, IntArray]:
    """Return the row of each block table in ``_Table``, and the tables ``[rows, width]``, grouped by request."""
    if batch.group_tables is None:
        return slots, host_array(batch.block_table).astype(np.int64, copy=False)
    tables = host_array(batch.group_tables).astype(np.int64, copy=False)
    rows = slots * len(tables) + np.arange(len(tables))[:, None]
    return rows.ravel(), tables.reshape(-1, tables.shape[2])


def _at_least(size: int, required: int) -> int:
    return size if required <= size else max(required, 2 * size)


def _ints(data: bytes) -> IntArray:
    # Copied, because torch requires writable memory.
    return np.frombuffer(data, np.int64).copy()


def _bytes_of(tensor: Tensor) -> bytes:
    return host_array(tensor).astype(np.int64, copy=False).tobytes()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _raw_bytes(tensor: Tensor) -> bytes:
    # Viewed as bytes, because numpy has no bfloat16.
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
