"""Numbers in ggml's blocks, unpacked to float32 as ``ggml-quants.c`` and ``gguf.quants`` compute them, bit for bit.

Each function takes blocks [N, bytes of a block] uint8 and returns [N, values of a block] float32, or ``Parts`` of
them. In its names a block has a scale ``d``, and a minimum ``m`` where its values begin at one. The K types have scales
and minimums of six bits for parts of a block, under one scale and one minimum of float16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ....kernels.linear.blocks import BlockForm, Blocks
from .container import BY_PACKAGE


class Parts(NamedTuple):
    """Numbers [N, V] int8 of blocks, and the scales and minimums [N, P] float32 of their parts. Minimums may be
    None.
    """

    numbers: Tensor
    scales: Tensor
    minimums: Tensor | None = None

    def values(self) -> Tensor:
        """Return the numbers that the blocks represent, [N, V] float32."""
        values = self.numbers.float().unflatten(1, (self.scales.shape[1], -1)) * self.scales[..., None]
        return (values if self.minimums is None else values + self.minimums[..., None]).flatten(1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte ``at`` of each block: [N, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return all lower halves of the bytes [..., B], then all upper ones: [..., 2 B]."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Return the bits of the four bytes at ``at``, the lowest first, as 16 and 0: [N, 32] uint8."""
    bits = torch.arange(8, dtype=torch.uint8)
    return (((blocks[:, at : at + 4, None] >> bits) & 1) << 4).flatten(1)


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[:, 2:]).char() - 8, _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[:, 4:]).char(), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Parts:
    return Parts((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).char() - 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Parts:
    return Parts((_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).char(), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0))


def _scales_and_minimums(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack eight scales and minimums of six bits from twelve bytes: [N, 12] uint8 to twice [N, 8] float32."""
    first, second, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (high & 15) | ((first >> 2) & 48)), -1)
    minimums = torch.cat((second & 63, (high >> 4) | ((second >> 2) & 48)), -1)
    return scales.float(), minimums.float()


def _of_k(blocks: Tensor, numbers: Tensor) -> Parts:
    """Return the parts of Q4_K and Q5_K, whose blocks start equally, with ``numbers`` [N, 8, 32]."""
    scales, minimums = _scales_and_minimums(blocks[:, 4:16])
    return Parts(numbers.char().flatten(1), _half(blocks, 0) * scales, -_half(blocks, 2) * minimums)


def _q4_k(blocks: Tensor) -> Parts:
    return _of_k(blocks, _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).unflatten(-1, (2, 32)).flatten(1, 2))


def _q5_k(blocks: Tensor) -> Parts:
    low = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).unflatten(-1, (2, 32)).flatten(1, 2)
    # Bit n of each of 32 bytes belongs to part n.
    parts = torch.arange(8, dtype=torch.uint8)[:, None]
    return _of_k(blocks, low | (((blocks[:, None, 16:48] >> parts) & 1) << 4))


def _q6_k(blocks: Tensor) -> Parts:
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).flatten(1)
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (((blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> pairs) & 3) << 4).flatten(1)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return Parts((low | high).char() - 32, _half(blocks, 208) * scales)


def _pairs_of_bits(packed: Tensor, width: int) -> Tensor:
    """Unpack two bits at a time: the lowest of ``width`` bytes, then the next ones: [N, B] uint8 to [N, 4 B] uint8."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return ((packed.unflatten(1, (-1, 1, width)) >> shifts) & 3).flatten(1)


def _q2_k(blocks: Tensor) -> Parts:
    scales = blocks[:, :16]
    steps = _half(blocks, 80) * (scales & 15).float()
    minimums = _half(blocks, 82) * (scales >> 4).float()
    return Parts(_pairs_of_bits(blocks[:, 16:80], 32).char(), steps, -minimums)


def _q3_k(blocks: Tensor) -> Parts:
    # Sixteen scales of six bits: four bits of all in eight bytes, then two of all in four.
    low = _nibbles(blocks[:, 96:104])
    scales = ((low | (_pairs_of_bits(blocks[:, 104:108], 4) << 4)).float() - 32) * _half(blocks, 108)
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    # A value whose third bit is not set is 4 less.
    third = ((blocks[:, None, :32] >> bits) & 1).flatten(1)
    return Parts(_pairs_of_bits(blocks[:, 32:96], 32).char() - 4 * (1 - third.char()), scales)


# Values of four bits, closer to each other around zero.
_UNEVEN = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
# Twice the values of E2M1; their scales are halved.
_E2M1 = torch.tensor([0.0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12])
_HALF_E8M0 = torch.tensor([2.0 ** (byte - 128) for byte in range(256)])


def _iq4_nl(blocks: Tensor) -> Parts:
    return Parts(_UNEVEN[_nibbles(blocks[:, 2:]).int()], _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Parts:
    # Eight scales of six bits: two bits of all in two bytes, then four of all in four.
    high = _pairs_of_bits(blocks[:, 2:4], 1)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), -1).flatten(1)
    scales = _half(blocks, 0) * ((low | (high << 4)).float() - 32)
    return Parts(_UNEVEN[_nibbles(blocks[:, 8:].unflatten(1, (8, 16))).int()].flatten(1), scales)


def _mxfp4(blocks: Tensor) -> Parts:
    return Parts(_E2M1.char()[_nibbles(blocks[:, 1:]).int()], _HALF_E8M0[blocks[:, :1].int()])


def _nvfp4(blocks: Tensor) -> Tensor:
    # E4M3 without a sign; 127 stands for 0.
    bits = blocks[:, :4]
    scales = torch.where(bits == 127, 0, bits & 127).view(torch.float8_e4m3fn).float() * 0.5
    values = _E2M1[_nibbles(blocks[:, 4:].unflatten(1, (4, 8))).int()]
    return (scales[..., None] * values).flatten(1)


def _tq1_0(blocks: Tensor) -> Tensor:
    # Five values of three in a byte, as a fraction of 256: the highest is the whole part of three times it.
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)[:, None]
    parts = (blocks[:, None, :32] * powers, blocks[:, None, 32:48] * powers, blocks[:, None, 48:52] * powers[:4])
    fractions = torch.cat([part.flatten(1) for part in parts], -1)
    return _half(blocks, 52) * (((fractions.int() * 3) >> 8) - 1).float()


def _tq2_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 64) * (_pairs_of_bits(blocks[:, :64], 32).float() - 1)


def _by_parts(read: Callable[[Tensor], Parts]) -> Callable[[Tensor], Tensor]:
    return lambda blocks: read(blocks).values()


def _by_package(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function of the package gguf, which has the tables of codes."""

    def unpack(blocks: Tensor) -> Tensor:
        from gguf import GGMLQuantizationType, dequantize

        return torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType[name]))

    return unpack


# Bits of the numbers of these types, which begin at 0, or in the middle without minimums.
_BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q6_K": 6, "Q2_K": 4, "Q3_K": 4, "MXFP4": 5}
_BYTE = 8
# Types of which the kernels take the numbers as they are.
_PARTS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def has_parts(kind: str) -> bool:
    """Return whether ``read_blocks`` can read a type."""
    return kind in _PARTS


def read_blocks(kind: str, blocks: Tensor, num_outputs: int) -> Blocks | None:
    """Return a weight for the kernels, in the numbers of the file; None if a scale is no number in float16.

    Args:
        blocks: all blocks of the weight, output by output.
    """
    parts = _PARTS[kind](blocks)
    size = parts.numbers.shape[1] // parts.scales.shape[1]
    form = BlockForm.smallest(_BITS.get(kind, _BYTE), size, has_minimums=parts.minimums is not None)
    scales = parts.scales.half().view(num_outputs, -1)
    minimums = None if parts.minimums is None else parts.minimums.half().view(num_outputs, -1)
    if not all(each is None or each.isfinite().all() for each in (scales, minimums)):
        return None
    numbers = parts.numbers.view(torch.uint8)
    numbers = numbers if form.has_minimums else numbers + form.zero
    return Blocks(form, numbers.view(num_outputs, -1), scales, minimums)


UNPACK: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda blocks: blocks.contiguous().view(torch.float32),
    "F16": lambda blocks: blocks.contiguous().view(torch.float16).float(),
    "BF16": lambda blocks: blocks.contiguous().view(torch.bfloat16).float(),
    "NVFP4": _nvfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    **{name: _by_parts(read) for name, read in _PARTS.items()},
    **{name: _by_package(name) for name in BY_PACKAGE},
}
