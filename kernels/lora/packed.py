"""Adapters in the layout of the compiled library: each with the rank that it has, any number of them in a batch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import KernelInputError
from ..linear import LinearStruct, PackedWeight, can_pack, pack_weight
from ..native import library

MAX_PARTS = 4
_INT = ctypes.c_int64
# Of the library: it takes inputs in groups of four bytes.
_GROUP_BYTES = 4
# Outputs that lie together in what makes of inputs as many numbers as the rank says.
_STRIP = 16


class PartStruct(ctypes.Structure):
    """What ``kernels/native/adapters.h`` declares, field by field."""

    _fields_ = (("b", LinearStruct), ("first_column", _INT), ("first_output", _INT))


class ProductStruct(ctypes.Structure):
    """As ``PartStruct``: an adapter at a product; zeros are none."""

    _fields_ = (("a", LinearStruct), ("parts", PartStruct * MAX_PARTS), ("num_parts", _INT))


@dataclass(frozen=True)
class LoraPart:
    """What an adapter adds to the outputs of a product from ``first_output`` on.

    Args:
        a: ``[R, K]``.
        b: ``[N, R]``, the adapter's scale in it.
    """

    first_output: int
    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class PackedLora:
    """One adapter at one product, laid out: ``a`` in strips of 16 outputs. ``struct`` knows where it lies and does not
    keep it alive.
    """

    a: PackedWeight
    parts: tuple[tuple[PackedWeight, int, int], ...]

    def struct(self) -> ProductStruct:
        parts = (PartStruct(b.struct(), column, output) for b, column, output in self.parts)
        return ProductStruct(self.a.struct(), (PartStruct * MAX_PARTS)(*parts), len(self.parts))


def can_pack_lora(num_inputs: int, dtype: torch.dtype) -> bool:
    """Whether the compiled library is there and takes products of that many inputs."""
    return library("add_adapters", dtype) is not None and can_pack(torch.empty(1, num_inputs, dtype=dtype))


def pack_lora(parts: Sequence[LoraPart]) -> PackedLora:
    """Lay out what an adapter does to one product, at most ``MAX_PARTS`` parts of its outputs, of one dtype.

    Raises:
        KernelInputError: ``can_pack_lora`` says no, or there are too many parts.
    """
    if not 0 < len(parts) <= MAX_PARTS:
        raise KernelInputError(f"an adapter has 1 to {MAX_PARTS} parts at a product, got {len(parts)}")
    group = _GROUP_BYTES // parts[0].a.dtype.itemsize
    rows, packed, column = [], [], 0
    for part in parts:
        missing = -len(part.a) % group
        rows.append(F.pad(part.a, (0, 0, 0, missing)))
        packed.append((pack_weight(F.pad(part.b, (0, missing))), column, part.first_output))
        column += len(part.a) + missing
    return PackedLora(_in_strips(torch.cat(rows)), tuple(packed))


def _in_strips(matrix: Tensor) -> PackedWeight:
    """A matrix ``[R, K]`` as ``[strips, K / G, 16, G]``; the rows beyond ``R`` are zero."""
    num_outputs, num_inputs = matrix.shape
    strips = F.pad(matrix, (0, 0, 0, -num_outputs % _STRIP)).unflatten(0, (-1, _STRIP))
    in_groups = strips.unflatten(2, (-1, _GROUP_BYTES // matrix.dtype.itemsize))
    return PackedWeight(in_groups.transpose(1, 2).contiguous(), None, num_inputs, num_outputs)


def add_packed_lora(inputs: Tensor, products: ctypes.Array[ProductStruct], token_lora: Tensor, out: Tensor) -> None:
    """Add to each row of ``out`` what the row's adapter makes of its inputs, in place.

    Args:
        inputs: ``[T, K]``, last axis contiguous.
        products: a struct for each slot, of ``PackedLora`` that are alive, or zeros.
        token_lora: ``[T]`` int64, contiguous, slots; negative is none.
        out: ``[T, N]``, dtype of ``inputs``, last axis contiguous. **Mutated**.

    The first product is rounded to the dtype; the second one's sums are added in float32 and rounded once. A row has
    the same bits whatever the other rows are.

    Raises:
        KernelInputError: a dtype, shape or stride above does not hold, or the library was unloaded.

    Cost: memory bound, the bytes of the adapters that occur, for few rows of each; else ``2 * T * R * (K + N)``.
    Source: as ``lora_shrink``.
    """
    function = library("add_adapters", inputs.dtype)
    if function is None or out.dtype != inputs.dtype or inputs.stride(-1) != 1 or out.stride(-1) != 1:
        raise KernelInputError(f"inputs and out must be of one dtype, rows contiguous, got {inputs.dtype}, {out.dtype}")
    is_known = token_lora.dtype == torch.int64 and token_lora.is_contiguous()
    if not is_known or not len(token_lora) == len(inputs) == len(out):
        found = f"{token_lora.dtype} {tuple(token_lora.shape)}"
        raise KernelInputError(f"token_lora must be int64 [{len(inputs)}], as many as rows of out, got {found}")
    function(
        *(inputs.data_ptr(), inputs.stride(0), ctypes.addressof(products), token_lora.data_ptr()),
        *(out.data_ptr(), out.stride(0), len(inputs)),
    )
