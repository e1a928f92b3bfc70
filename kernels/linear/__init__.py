"""Products with a weight that is packed once for the processor: unquantized, in bytes, or in four bits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch import KernelInputError
from ..huge_pages import Arena
from ..native import library
from ..rotation import rotate
from .blocks import BlockForm, Blocks, pack_panels, unpack_panels

PANEL = 64
_GROUP_BYTES = 4
# Layout of four-bit weights, see ``kernels/native/weights/nibbles.h``. Inputs are padded to whole steps of a tile. The
# inputs of a block share a step per output; steps are stored before the nibbles.
_NIBBLE_INPUTS_MULTIPLE = 64
_BLOCK_INPUTS = 32
_BLOCK_BYTES = PANEL + _BLOCK_INPUTS // 2 * PANEL


class LinearStruct(ctypes.Structure):
    """Struct of ``kernels/native/weights/panels.h``, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "bias", "scales", "offsets")),
        ("num_inputs", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("is_in_nibbles", "block_inputs", "block_bits", "has_minimums")),
    )


@dataclass(frozen=True)
class PackedWeight:
    """A weight ``[N, K]`` in panels of 64 outputs, ``[P, K / G, 64, G]`` with ``G`` inputs in 4 bytes.

    Outputs beyond ``N`` are zero, and ``bias``, ``scales`` and ``offsets`` include them. A panel of four-bit weights is
    ``[K / 32, 1088]``: for every 32 inputs, a byte per output with its step and zero, then two nibbles per byte.
    Numbers of a quantized file are in blocks, ``[P, blocks, bytes]`` uint8 without scales (``native/blocks.h``).

    Args:
        packed: in the weight's dtype; int8 for bytes, uint8 for four bits.
        bias: float32, or None.
        scales: float32, the quantization step of each output; None for an unquantized weight.
        offsets: int32, subtracted from each output's sum, since quantized inputs have a zero point of 128; None for an
            unquantized weight.
    """

    packed: Tensor
    bias: Tensor | None
    num_inputs: int
    num_outputs: int
    scales: Tensor | None = None
    offsets: Tensor | None = None

    def struct(self) -> LinearStruct:
        parts = (self.packed, self.bias, self.scales, self.offsets)
        addresses = (None if part is None else part.data_ptr() for part in parts)
        blocks = self.blocks
        form = (0, 0, 0) if blocks is None else (blocks.num_inputs, blocks.bits, blocks.has_minimums)
        return LinearStruct(*addresses, self.num_inputs, self.num_outputs, self.is_in_nibbles, *form)

    @property
    def blocks(self) -> BlockForm | None:
        """Form of the blocks that hold the numbers of a quantized file; None for other weights."""
        if self.packed.dtype != torch.uint8 or self.scales is not None:
            return None
        return BlockForm.of_packed(self.packed, self.num_inputs, PANEL)

    @property
    def is_in_nibbles(self) -> bool:
        """Whether the weight is in four bits that were rounded here; the numbers of a file are not."""
        return self.packed.dtype == torch.uint8 and self.scales is not None


def can_pack(weight: Tensor) -> bool:
    """Return whether the compiled library is loaded and can pack the weight."""
    return _is_supported(weight) and weight.shape[1] % (_GROUP_BYTES // weight.dtype.itemsize) == 0


def can_quantize(weight: Tensor) -> bool:
    """Return whether ``weight`` can be packed in bytes."""
    return _is_supported(weight) and weight.shape[1] % _GROUP_BYTES == 0


def can_quantize_to_nibbles(weight: Tensor) -> bool:
    """Return whether ``weight`` can be packed in four bits."""
    return _is_supported(weight)


def can_multiply_blocks(dtype: torch.dtype) -> bool:
    """Return whether the compiled library is loaded and multiplies inputs of ``dtype`` with weights in blocks."""
    return library("linear", dtype) is not None


def pack_weight(weight: Tensor, bias: Tensor | None = None, arena: Arena | None = None) -> PackedWeight:
    """Pack a weight ``[N, K]`` and a bias ``[N]``.

    Args:
        arena: allocates the packed weight; None for a separate allocation.

    Raises:
        KernelInputError: ``can_pack`` is False.
    """
    function = library("pack_linear", weight.dtype)
    if function is None or not can_pack(weight):
        raise KernelInputError(f"a weight {weight.dtype} {tuple(weight.shape)} cannot be packed here")
    num_outputs, num_inputs = weight.shape
    source = weight.detach().contiguous()
    packed = _empty_panels(num_outputs, num_inputs, weight.dtype, arena)
    function(source.data_ptr(), packed.data_ptr(), num_outputs, num_inputs)
    return PackedWeight(packed, pack_bias(bias), num_inputs, num_outputs)


def quantize_weight(weight: Tensor, bias: Tensor | None = None, arena: Arena | None = None) -> PackedWeight:
    """Pack a weight ``[N, K]`` in bytes from -127 to 127, with a scale per output; the bias stays in float32.

    The weight is rotated first, as ``linear`` rotates its inputs (``kernels/rotation.py``).

    Args:
        arena: as for ``pack_weight``.

    Raises:
        KernelInputError: ``can_quantize`` is False.
    """
    if not can_quantize(weight):
        raise KernelInputError(f"a weight {weight.dtype} {tuple(weight.shape)} cannot be packed in bytes here")
    return _quantize("quantize_linear", weight, _empty_panels(len(weight), weight.shape[1], torch.int8, arena), bias)


def quantize_weight_to_nibbles(
    weight: Tensor, bias: Tensor | None = None, arena: Arena | None = None, feedback: Tensor | None = None
) -> PackedWeight:
    """Pack a weight ``[N, K]`` in four bits, with a step and a zero per 32 inputs of an output.

    An element is ``scale * step * (nibble - zero)``. The scale belongs to the output; the others are 0 to 15. For each
    block, a few steps and zeros near its range are tried, and the least squared error wins. The bias stays in float32.
    The weight is rotated first, as ``linear`` rotates its inputs.

    Args:
        arena: as for ``pack_weight``.
        feedback: float32 ``[K, K]`` of ``error_feedback``; None to round each element to the nearest.

    Raises:
        KernelInputError: ``can_quantize_to_nibbles`` is False.

    Source: Lin et al. 2024 (arXiv:2405.04532), progressive group quantization.
    """
    if not can_quantize_to_nibbles(weight):
        raise KernelInputError(f"a weight {weight.dtype} {tuple(weight.shape)} cannot be packed in four bits here")
    num_inputs = -(-weight.shape[1] // _NIBBLE_INPUTS_MULTIPLE) * _NIBBLE_INPUTS_MULTIPLE
    shape = (_padded(len(weight)) // PANEL, num_inputs // _BLOCK_INPUTS, _BLOCK_BYTES)
    packed = torch.empty(shape, dtype=torch.uint8) if arena is None else arena.zeros(shape, torch.uint8)
    if feedback is None:
        return _quantize("quantize_linear_to_nibbles", weight, packed, bias, None)
    size = weight.shape[1]
    if feedback.shape != (size, size) or feedback.dtype != torch.float32 or not feedback.is_contiguous():
        actual = f"{feedback.dtype} {tuple(feedback.shape)}"
        raise KernelInputError(f"feedback must be contiguous float32 [{size}, {size}], got {actual}")
    return _quantize("quantize_linear_to_nibbles", weight, packed, bias, feedback.data_ptr())


def pack_blocks(parts: Sequence[Blocks], bias: Tensor | None = None, arena: Arena | None = None) -> PackedWeight:
    """Pack the outputs of all ``parts``, in a form that holds each of them exactly.

    Args:
        parts: with the same number of inputs.
        arena: as for ``pack_weight``.
    """
    form, num_outputs = BlockForm.common([part.form for part in parts]), sum(len(part.numbers) for part in parts)
    num_inputs = parts[0].numbers.shape[1]
    shape = (_padded(num_outputs) // PANEL, num_inputs // form.num_inputs, form.num_bytes(PANEL))
    packed = torch.empty(shape, dtype=torch.uint8) if arena is None else arena.zeros(shape, torch.uint8)
    pack_panels([part.to(form) for part in parts], form, packed)
    return PackedWeight(packed, pack_bias(bias), num_inputs, num_outputs)


def _quantize(name: str, weight: Tensor, packed: Tensor, bias: Tensor | None, *options: int | None) -> PackedWeight:
    function = library(name, weight.dtype)
    assert function is not None  # the callers have checked
    num_outputs, num_inputs = weight.shape
    source = weight.detach().contiguous()
    scales, offsets = torch.zeros(_padded(num_outputs)), torch.zeros(_padded(num_outputs), dtype=torch.int32)
    pointers = (tensor.data_ptr() for tensor in (packed, scales, offsets))
    function(source.data_ptr(), *options, *pointers, num_outputs, num_inputs)
    return PackedWeight(packed, pack_bias(bias), num_inputs, num_outputs, scales, offsets)


def unpack_weight(weight: PackedWeight) -> Tensor:
    """Return the weight ``[N, K]``; exactly if it is unquantized, else its dequantized float32 values."""
    if weight.blocks is not None:
        return unpack_panels(weight.packed, weight.blocks)[: weight.num_outputs]
    panels = _unpack_nibbles(weight.packed) if weight.is_in_nibbles else weight.packed
    plain = panels.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)[: weight.num_outputs, : weight.num_inputs]
    if weight.scales is None:
        return plain
    return rotate(plain * weight.scales[: weight.num_outputs, None])


def split_weight(weight: PackedWeight, num_outputs: Sequence[int]) -> list[PackedWeight]:
    """Split ``weight`` into views with ``num_outputs`` outputs each.

    Raises:
        KernelInputError: a part before the last does not end with a panel, or the sum of outputs is wrong.
    """
    if any(num % PANEL for num in num_outputs[:-1]) or sum(num_outputs) != weight.num_outputs:
        raise KernelInputError(
            f"num_outputs must be multiples of {PANEL}, except the last, and {weight.num_outputs} in total, got "
            f"{list(num_outputs)}"
        )
    sizes = [_padded(num) for num in num_outputs]
    panels = weight.packed.split([size // PANEL for size in sizes])
    per_output = [_split(part, sizes) for part in (weight.bias, weight.scales, weight.offsets)]
    return [
        PackedWeight(packed, bias, weight.num_inputs, num, scales, offsets)
        for packed, num, bias, scales, offsets in zip(panels, num_outputs, *per_output, strict=True)
    ]


def join_weights(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Concatenate the outputs of all parts into one weight; parts from ``split_weight`` of one weight are not copied.

    Raises:
        KernelInputError: a part before the last does not end with a panel, or dtypes or inputs differ.
    """
    first = parts[0]
    if any(part.num_outputs % PANEL for part in parts[:-1]) or any(
        (part.packed.dtype, part.num_inputs, part.blocks) != (first.packed.dtype, first.num_inputs, first.blocks)
        for part in parts
    ):
        raise KernelInputError("weights to join must have the same inputs and dtype, and whole panels")
    sizes = [_padded(part.num_outputs) for part in parts]
    has_bias = any(part.bias is not None for part in parts)
    biases = [torch.zeros(size) if part.bias is None else part.bias for part, size in zip(parts, sizes, strict=True)]
    return PackedWeight(
        _join([part.packed for part in parts]),
        _join(biases) if has_bias else None,
        first.num_inputs,
        sum(part.num_outputs for part in parts),
        None if first.scales is None else _join([part.scales for part in parts if part.scales is not None]),
        None if first.offsets is None else _join([part.offsets for part in parts if part.offsets is not None]),
    )


def _split(tensor: Tensor | None, sizes: list[int]) -> Sequence[Tensor | None]:
    return [None] * len(sizes) if tensor is None else tensor.split(sizes)


def _join(tensors: list[Tensor]) -> Tensor:
    """Concatenate the rows of all tensors; return a view if they are consecutive in memory."""
    first, end = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        is_next = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not is_next or tensor.storage_offset() != end or not tensor.is_contiguous():
            return torch.cat(tensors)
        end += tensor.numel()
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def _unpack_nibbles(nibbles: Tensor) -> Tensor:
    """Return panels of ``step * (nibble - zero)``, ``[P, K / 4, 64, 4]``."""
    heads = nibbles[..., :PANEL].unflatten(2, (16, 4)).transpose(2, 3).flatten(2).to(torch.int16)
    pairs = nibbles[..., PANEL:].unflatten(2, (-1, 1, PANEL, 4))
    both = torch.cat([pairs & 15, pairs >> 4], 3).to(torch.int16)
    steps, zeros = ((part[:, :, None, None, :, None]) for part in (heads & 15, heads >> 4))
    return (steps * (both - zeros)).flatten(1, 3)


def linear(inputs: Tensor, weight: PackedWeight) -> Tensor:
    """Return ``inputs @ weight.T + bias``, summed in float32 and rounded once.

    With a quantized weight the inputs are rotated and quantized to bytes, with a scale per row. With a weight in blocks
    they are quantized to bytes with a scale per block of a row.

    Args:
        inputs: ``[..., K]``, dtype of the unpacked weight.

    Returns:
        ``[..., N]``, dtype of ``inputs``. The bits of a row do not depend on the other rows.

    Raises:
        KernelInputError: a shape or dtype above does not hold, or the library was unloaded.

    Cost: for few rows memory bound by the weight; else ``2 * T * N * K`` operations.
    """
    function = library("linear", inputs.dtype)
    is_quantized = weight.scales is not None or weight.blocks is not None
    is_dtype_right = is_quantized or inputs.dtype == weight.packed.dtype
    if not is_dtype_right or inputs.shape[-1] != weight.num_inputs or function is None:
        dtype = "float" if is_quantized else weight.packed.dtype
        raise KernelInputError(
            f"inputs must be {dtype} [..., {weight.num_inputs}], got {inputs.dtype} {tuple(inputs.shape)}"
        )
    rows = inputs.reshape(-1, weight.num_inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty((*inputs.shape[:-1], weight.num_outputs), dtype=inputs.dtype)
    function(rows.data_ptr(), rows.stride(0), ctypes.byref(weight.struct()), out.data_ptr(), rows.shape[0])
    return out


def _is_supported(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and library("linear", weight.dtype) is not None


def _padded(num_outputs: int) -> int:
    return -(-num_outputs // PANEL) * PANEL


def _empty_panels(num_outputs: int, num_inputs: int, dtype: torch.dtype, arena: Arena | None) -> Tensor:
    group = _GROUP_BYTES // dtype.itemsize
    shape = (_padded(num_outputs) // PANEL, num_inputs // group, PANEL, group)
    return torch.empty(shape, dtype=dtype) if arena is None else arena.zeros(shape, dtype)


def pack_bias(bias: Tensor | None) -> Tensor | None:
    """Return a bias ``[N]`` padded to whole panels, as ``PackedWeight`` stores it."""
    if bias is None:
        return None
    packed = torch.zeros(_padded(len(bias)))
    packed[: len(bias)] = bias.detach()
    return packed
