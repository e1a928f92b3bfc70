"""Adapters in the layout of the compiled library. Each keeps its own rank, and a batch may use any number of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import KernelInputError
from ..linear import LinearStruct, PackedWeight, can_pack, pack_weight
from ..native import library

MAX_PARTS = 4
_INT = ctypes.c_int64
# The library reads inputs in groups of four bytes.
_GROUP_BYTES = 4
# Adjacent outputs in the packed first matrix.
_STRIP = 16


class PartStruct(ctypes.Structure):
    """Struct of ``kernels/native/decoder/adapters.h``, field by field."""

    _fields_ = (("b", LinearStruct), ("first_column", _INT), ("first_output", _INT))


class ProductStruct(ctypes.Structure):
    """Struct of an adapter of one product, also in ``adapters.h``; all zeros for no adapter."""

    _fields_ = (("a", LinearStruct), ("parts", PartStruct * MAX_PARTS), ("num_parts", _INT))


@dataclass(frozen=True)
class LoraPart:
    """Update of ``N`` outputs of a product, starting at ``first_output``.

    Args:
        a: ``[R, K]``.
        b: ``[N, R]``, multiplied by the adapter's scale.
    """

    first_output: int
    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class PackedLora:
    """Packed adapter of one product, with ``a`` in strips of 16 outputs.

    A ``struct`` stores addresses without keeping the tensors alive.

    Args:
        parts: for each part its ``b``, its first column in the output of ``a``, and its first output.
    """

    a: PackedWeight
    parts: tuple[tuple[PackedWeight, int, int], ...]

    def struct(self) -> ProductStruct:
        parts = (PartStruct(b.struct(), column, output) for b, column, output in self.parts)
        return ProductStruct(self.a.struct(), (PartStruct * MAX_PARTS)(*parts), len(self.parts))


def can_pack_lora(num_inputs: int, dtype: torch.dtype) -> bool:
    """Return whether the compiled library is loaded and supports products with this many inputs."""
    return library("add_adapters", dtype) is not None and can_pack(torch.empty(1, num_inputs, dtype=dtype))


def pack_lora(parts: Sequence[LoraPart]) -> PackedLora:
    """Pack an adapter of one product, which updates at most ``MAX_PARTS`` parts of its outputs, all of one dtype.

    Raises:
        KernelInputError: ``can_pack_lora`` is False, or there are too many parts.
    """
    if not 0 < len(parts) <= MAX_PARTS:
        raise KernelInputError(f"an adapter must have 1 to {MAX_PARTS} parts per product, got {len(parts)}")
    group = _GROUP_BYTES // parts[0].a.dtype.itemsize
    rows, packed, column = [], [], 0
    for part in parts:
        missing = -len(part.a) % group
        rows.append(F.pad(part.a, (0, 0, 0, missing)))
        packed.append((pack_weight(F.pad(part.b, (0, missing))), column, part.first_output))
        column += len(part.a) + missing
    return PackedLora(_pack_strips(torch.cat(rows)), tuple(packed))


def _pack_strips(matrix: Tensor) -> PackedWeight:
    """Pack a matrix ``[R, K]`` as ``[strips, K / G, 16, G]``; rows beyond ``R`` are zero."""
    num_outputs, num_inputs = matrix.shape
    strips = F.pad(matrix, (0, 0, 0, -num_outputs % _STRIP)).unflatten(0, (-1, _STRIP))
    in_groups = strips.unflatten(2, (-1, _GROUP_BYTES // matrix.dtype.itemsize))
    return PackedWeight(in_groups.transpose(1, 2).contiguous(), None, num_inputs, num_outputs)


def add_packed_lora(inputs: Tensor, products: ctypes.Array[ProductStruct], token_lora: Tensor, out: Tensor) -> None:
    """Add the update of each row's adapter to ``out``, in place.

    Args:
        inputs: ``[T, K]``, last axis contiguous.
        products: a struct per slot, from a ``PackedLora`` that is still alive, or zeros.
        token_lora: ``[T]`` int64, contiguous, slots; negative for none.
        out: ``[T, N]``, dtype of ``inputs``, last axis contiguous. **Mutated**.

    The first product is rounded to the dtype. The sums of the second are added to ``out`` in float32 and rounded once.
    The bits of a row do not depend on the other rows.

    Raises:
        KernelInputError: a dtype, shape or stride above does not hold, or the library was unloaded.

    Cost: for few rows per adapter memory bound by the adapters that occur; else ``2 * T * R * (K + N)``.
    Source: as ``lora_shrink``.
    """
    function = library("add_adapters", inputs.dtype)
    if function is None or out.dtype != inputs.dtype or inputs.stride(-1) != 1 or out.stride(-1) != 1:
        raise KernelInputError(f"inputs and out must be of one dtype, rows contiguous, got {inputs.dtype}, {out.dtype}")
    is_supported = token_lora.dtype == torch.int64 and token_lora.is_contiguous()
    if not is_supported or not len(token_lora) == len(inputs) == len(out):
        actual = f"{token_lora.dtype} {tuple(token_lora.shape)}"
        raise KernelInputError(f"token_lora must be int64 [{len(inputs)}], with out of as many rows, got {actual}")
    slots, adapters = token_lora.data_ptr(), ctypes.addressof(products)
    function(inputs.data_ptr(), inputs.stride(0), adapters, slots, out.data_ptr(), out.stride(0), len(inputs))
