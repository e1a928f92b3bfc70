"""Weights as files of quantized weights have them: numbers of at most eight bits, and a scale for a block of inputs.

``kernels/native/weights/blocks.h`` describes the packed layout. It holds the numbers of a file as they are.
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
_NIBBLE_BITS, _BYTE_BITS = 4, 8
# Bits per number that the kernels know, by the inputs that share a scale.
_WIDTHS = {16: (4, 6, 8), 32: (4, 5, 8)}


@dataclass(frozen=True)
class BlockForm:
    """Form of the blocks of a packed weight.

    Args:
        bits: of a number, 4 or 8; also 5 in blocks of 32, and 6 in blocks of 16.
        num_inputs: that share a scale, 16 or 32.
        has_minimums: a weight is ``scale * number + minimum``; else it is ``scale * (number - zero)``.
    """

    bits: int
    num_inputs: int
    has_minimums: bool

    @classmethod
    def smallest(cls, bits: int, num_inputs: int, *, has_minimums: bool) -> BlockForm:
        """Return the form with the fewest bits, at least ``bits``."""
        return cls(next(width for width in _WIDTHS[num_inputs] if width >= bits), num_inputs, has_minimums)

    @classmethod
    def common(cls, forms: Sequence[BlockForm]) -> BlockForm:
        """Return the smallest form to which blocks of all ``forms`` can be converted."""
        bits, num_inputs = max(form.bits for form in forms), min(form.num_inputs for form in forms)
        return cls.smallest(bits, num_inputs, has_minimums=any(form.has_minimums for form in forms))

    @classmethod
    def of_packed(cls, packed: Tensor, num_inputs: int, num_outputs: int) -> BlockForm:
        """Return the form of panels of ``num_outputs`` outputs."""
        return _form_of(num_inputs // packed.shape[1], packed.shape[2] // num_outputs)

    @property
    def zero(self) -> int:
        """The number that stands for zero in a weight without minimums."""
        return 1 << (self.bits - 1)

    @property
    def has_upper_bits(self) -> bool:
        """Whether the bits above the nibbles are in words of their own."""
        return _NIBBLE_BITS < self.bits < _BYTE_BITS

    def num_bytes(self, num_outputs: int) -> int:
        """Return the size of a block of this number of outputs."""
        halves = 2 if self.has_minimums else 1
        return num_outputs * (halves * _HALF_BYTES + self.num_inputs * self.bits // 8)


@dataclass(frozen=True)
class Blocks:
    """A weight ``[N, K]`` in the numbers of a file.

    Args:
        numbers: ``[N, K]`` uint8, below ``1 << form.bits``.
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
        elif minimums is None and self.form.bits < form.bits:
            numbers = numbers + (form.zero - self.form.zero)
        times = self.form.num_inputs // form.num_inputs
        if times > 1:
            scales = scales.repeat_interleave(times, 1)
            minimums = None if minimums is None else minimums.repeat_interleave(times, 1)
        return replace(self, form=form, numbers=numbers, scales=scales, minimums=minimums)


def join_blocks(parts: Sequence[Blocks]) -> Blocks:
    """Return one weight with the outputs of all ``parts``."""
    if len(parts) == 1:
        return parts[0]
    form = BlockForm.common([part.form for part in parts])
    same = [part.to(form) for part in parts]
    minimums = [part.minimums for part in same if part.minimums is not None]
    return Blocks(
        form,
        torch.cat([part.numbers for part in same]),
        torch.cat([part.scales for part in same]),
        torch.cat(minimums) if minimums else None,
    )


@cache
def _form_of(num_inputs: int, num_bytes: int) -> BlockForm:
    """Return the form of blocks of ``num_inputs`` inputs; each has another number of bytes for an output.

    Cached, because each product asks for it.
    """
    forms = (BlockForm(*each) for each in itertools.product(_WIDTHS[num_inputs], (num_inputs,), (False, True)))
    return next(form for form in forms if form.num_bytes(1) == num_bytes)


def pack_panels(parts: Sequence[Blocks], form: BlockForm, packed: Tensor) -> None:
    """Write ``parts`` into ``packed``, ``[panels, blocks, bytes]`` uint8, one after the other."""
    halves = [torch.cat([part.scales for part in parts])]
    if form.has_minimums:
        halves.append(torch.cat([part.minimums for part in parts if part.minimums is not None]))
    numbers = torch.cat([part.numbers for part in parts])
    if form.bits < _BYTE_BITS:
        numbers = _pack_bits(numbers, form)
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
    if form.bits < _BYTE_BITS:
        numbers = _unpack_bits(numbers, form)
    values = (numbers.float() - (0 if form.has_minimums else form.zero)) * halves[:, :, 0]
    if form.has_minimums:
        values += halves[:, :, 1]
    return values.transpose(1, 2).flatten(0, 1).flatten(1)


def _pack_bits(numbers: Tensor, form: BlockForm) -> Tensor:
    """Pack numbers [N, K] into bytes, block by block: the words of upper bits, if any, then nibbles."""
    groups = numbers.unflatten(1, (-1, form.num_inputs // _GROUP, _GROUP))
    first, second = (groups & 15).chunk(2, 2)
    parts = [first | second << _NIBBLE_BITS]
    if form.has_upper_bits:
        upper = (groups >> _NIBBLE_BITS) << _upper_shifts(form)
        parts.insert(0, upper.sum(2, keepdim=True, dtype=torch.uint8))
    return torch.cat(parts, 2).flatten(1)


def _unpack_bits(packed: Tensor, form: BlockForm) -> Tensor:
    """Unpack the bytes of blocks, [..., B], to numbers [..., form.num_inputs]."""
    words = packed.unflatten(-1, (-1, _GROUP))
    nibbles = words[..., 1:, :] if form.has_upper_bits else words
    groups = torch.cat((nibbles & 15, nibbles >> _NIBBLE_BITS), -2)
    if form.has_upper_bits:
        mask = (1 << (form.bits - _NIBBLE_BITS)) - 1
        groups |= (words[..., :1, :] >> _upper_shifts(form) & mask) << _NIBBLE_BITS
    return groups.flatten(-2)


def _upper_shifts(form: BlockForm) -> Tensor:
    """Return the positions of the upper bits of a block's groups in a byte."""
    return torch.arange(0, 8, form.bits - _NIBBLE_BITS, dtype=torch.uint8)[:, None]


def _padded(rows: Tensor, num: int) -> Tensor:
    """Append rows of zeros."""
    return rows if len(rows) == num else torch.cat((rows, rows.new_zeros(num - len(rows), rows.shape[1])))
