"""Weights as files of quantized weights have them: numbers of at most eight bits, and a scale for a block of inputs.

``kernels/native/blocks.h`` describes the packed layout. It holds the numbers of a file as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

_GROUP = 4
_HALF_BYTES = 2
_NIBBLE_ZERO, _BYTE_ZERO = 8, 128
NIBBLE_BLOCK = 32


@dataclass(frozen=True)
class BlockForm:
    """Form of the blocks of a packed weight.

    Args:
        num_inputs: that share a scale: 16 or 32, and 32 in nibbles.
        has_minimums: a weight is ``scale * number + minimum``; else it is ``scale * (number - zero)``.
    """

    is_in_nibbles: bool
    num_inputs: int
    has_minimums: bool

    @classmethod
    def common(cls, forms: Sequence[BlockForm]) -> BlockForm:
        """Return the smallest form to which blocks of all ``forms`` can be converted."""
        is_in_nibbles = all(form.is_in_nibbles for form in forms)
        return cls(is_in_nibbles, min(form.num_inputs for form in forms), any(form.has_minimums for form in forms))

    @classmethod
    def of_packed(cls, packed: Tensor, num_inputs: int, num_outputs: int) -> BlockForm:
        """Return the form of panels of ``num_outputs`` outputs."""
        return _form_of(num_inputs // packed.shape[1], packed.shape[2] // num_outputs)

    @property
    def zero(self) -> int:
        """The number that stands for zero in a weight without minimums."""
        return _NIBBLE_ZERO if self.is_in_nibbles else _BYTE_ZERO

    def num_bytes(self, num_outputs: int) -> int:
        """Return the size of a block of this number of outputs."""
        halves = 2 if self.has_minimums else 1
        return num_outputs * (halves * _HALF_BYTES + self.num_inputs // (2 if self.is_in_nibbles else 1))


@dataclass(frozen=True)
class Blocks:
    """A weight ``[N, K]`` in the numbers of a file.

    Args:
        numbers: ``[N, K]`` uint8, below 16 in nibbles.
        scales: ``[N, K / form.num_inputs]`` float16.
        minimums: as ``scales``; None without.
    """

    form: BlockForm
    numbers: Tensor
    scales: Tensor
    minimums: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> Blocks:
        """Return blocks with the outputs that ``change`` returns for each tensor."""
        minimums = None if self.minimums is None else change(self.minimums)
        return Blocks(self.form, change(self.numbers), change(self.scales), minimums)

    def to(self, form: BlockForm) -> Blocks:
        """Convert to ``form``, a result of ``BlockForm.common``. Weights stay the same."""
        scales, minimums, numbers = self.scales, self.minimums, self.numbers
        if form.has_minimums and minimums is None:
            # A product with a power of two.
            minimums = scales * -self.form.zero
        elif minimums is None and self.form.is_in_nibbles and not form.is_in_nibbles:
            numbers = numbers + (_BYTE_ZERO - _NIBBLE_ZERO)
        times = self.form.num_inputs // form.num_inputs
        if times > 1:
            scales = scales.repeat_interleave(times, 1)
            minimums = None if minimums is None else minimums.repeat_interleave(times, 1)
        return replace(self, form=form, numbers=numbers, scales=scales, minimums=minimums)


@cache
def _form_of(num_inputs: int, num_bytes: int) -> BlockForm:
    """Return the form of blocks of ``num_inputs`` inputs; each has another number of bytes for an output.

    Cached, because each product asks for it.
    """
    forms = (BlockForm(*each) for each in itertools.product((False, True), (num_inputs,), (False, True)))
    return next(form for form in forms if form.num_bytes(1) == num_bytes)


def pack_panels(parts: Sequence[Blocks], form: BlockForm, packed: Tensor) -> None:
    """Write ``parts`` into ``packed``, ``[panels, blocks, bytes]`` uint8, one after the other."""
    halves = [torch.cat([part.scales for part in parts])]
    if form.has_minimums:
        halves.append(torch.cat([part.minimums for part in parts if part.minimums is not None]))
    numbers = torch.cat([part.numbers for part in parts])
    if form.is_in_nibbles:
        low, high = numbers.unflatten(1, (-1, 2, NIBBLE_BLOCK // 2)).unbind(2)
        numbers = (low | high << 4).flatten(1)
    size = packed.shape[0]
    outputs = packed.shape[2] // form.num_bytes(1)
    words = [_padded(part, size * outputs).view(torch.int16) for part in halves]
    head = len(halves) * outputs
    # Whole groups and float16 move as numbers, since moving bytes takes many times as long.
    for index, part in enumerate(words):
        target = packed.view(torch.int16)[:, :, index * outputs : (index + 1) * outputs]
        target.copy_(part.unflatten(0, (size, outputs)).transpose(1, 2))
    groups = _padded(numbers.view(torch.int32), size * outputs).unflatten(0, (size, outputs))
    target = packed.view(torch.int32)[:, :, head * _HALF_BYTES // _GROUP :].unflatten(2, (-1, outputs))
    target.copy_(groups.unflatten(2, (packed.shape[1], -1)).permute(0, 2, 3, 1))


def unpack_panels(packed: Tensor, form: BlockForm) -> Tensor:
    """Return the weights of all outputs of ``packed`` in float32."""
    outputs = packed.shape[2] // form.num_bytes(1)
    head = outputs * (2 if form.has_minimums else 1)
    halves = packed.view(torch.float16)[:, :, :head].float().unflatten(2, (-1, outputs, 1))
    groups = packed.view(torch.int32)[:, :, head * _HALF_BYTES // _GROUP :].unflatten(2, (-1, outputs))
    numbers = groups.transpose(2, 3).contiguous().view(torch.uint8)
    if form.is_in_nibbles:
        numbers = torch.cat((numbers & 15, numbers >> 4), -1)
    values = (numbers.float() - (0 if form.has_minimums else form.zero)) * halves[:, :, 0]
    if form.has_minimums:
        values += halves[:, :, 1]
    return values.transpose(1, 2).flatten(0, 1).flatten(1)


def _padded(rows: Tensor, num: int) -> Tensor:
    """Append rows of zeros."""
    return rows if len(rows) == num else torch.cat((rows, rows.new_zeros(num - len(rows), rows.shape[1])))
