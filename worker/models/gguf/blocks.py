"""Numbers in ggml's blocks, unpacked to float32 as ``ggml-quants.c`` and ``gguf.quants`` compute them, bit for bit.

Each function takes blocks [N, bytes of a block] uint8 and returns [N, values of a block] float32. In its names a block
has a scale ``d``, and a minimum ``m`` where its values begin at one. The K types have scales and minimums of six bits
for parts of a block, under one scale and one minimum of float16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


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


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _scales_and_minimums(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack eight scales and minimums of six bits from twelve bytes: [N, 12] uint8 to twice [N, 8, 1] float32."""
    first, second, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (high & 15) | ((first >> 2) & 48)), -1)
    minimums = torch.cat((second & 63, (high >> 4) | ((second >> 2) & 48)), -1)
    return scales.float()[..., None], minimums.float()[..., None]


def _of_k(blocks: Tensor, values: Tensor) -> Tensor:
    """Scale ``values`` [N, 8, 32] of Q4_K and Q5_K, whose blocks start equally."""
    scales, minimums = _scales_and_minimums(blocks[:, 4:16])
    scales, minimums = _half(blocks, 0)[..., None] * scales, _half(blocks, 2)[..., None] * minimums
    return (scales * values.float() - minimums).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _of_k(blocks, _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).unflatten(-1, (2, 32)).flatten(1, 2))


def _q5_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).unflatten(-1, (2, 32)).flatten(1, 2)
    # Bit n of each of 32 bytes belongs to part n.
    parts = torch.arange(8, dtype=torch.uint8)[:, None]
    return _of_k(blocks, low | (((blocks[:, None, 16:48] >> parts) & 1) << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).flatten(1)
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (((blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> pairs) & 3) << 4).flatten(1)
    values = ((low | high).float() - 32).unflatten(1, (16, 16))
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return ((_half(blocks, 208) * scales)[..., None] * values).flatten(1)


UNPACK: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda blocks: blocks.contiguous().view(torch.float32),
    "F16": lambda blocks: blocks.contiguous().view(torch.float16).float(),
    "BF16": lambda blocks: blocks.contiguous().view(torch.bfloat16).float(),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
