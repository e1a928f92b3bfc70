"""Triton kernels for the GPU: a program per token for keys and values, and one per piece of a block to copy."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cache_slots import INT8_LARGEST, SCALED_DIMS, CacheSlots

_COPY_BLOCK = 1024
_SCALED_DIMS, _INT8_LARGEST = tl.constexpr(SCALED_DIMS), tl.constexpr(INT8_LARGEST)
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def store_kv_cache(key: Tensor, value: Tensor, target: CacheSlots) -> None:
    """See ``kv_cache.store_kv_cache``."""
    num_tokens, num_heads, key_dim = key.shape
    value_dim = value.shape[2]
    if num_tokens == 0:
        return
    key, value = with_plain_rows(key), with_plain_rows(value)
    head_block = triton.next_power_of_2(num_heads)
    key_block, value_block = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    constants: dict[str, Any] = {
        "NUM_HEADS": num_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "HEAD_BLOCK": head_block,
        "KEY_BLOCK": key_block,
        "VALUE_BLOCK": value_block,
        "num_warps": num_warps_for(head_block * max(key_block, value_block)),
    }
    _store_kernel[(num_tokens,)](
        key, value, target.key_cache, target.value_cache, target.slot_mapping.contiguous(),
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        target.key_scale, target.value_scale,
        **constants,
    )  # fmt: skip


def copy_blocks(cache: Tensor, block_pairs: Tensor) -> None:
    """See ``kv_cache.copy_blocks``."""
    if block_pairs.shape[0] == 0 or cache.numel() == 0:
        return
    block_bytes = cache[0].nbytes
    width = next(width for width in _WORDS if block_bytes % width == 0 and cache.data_ptr() % width == 0)
    num_words = block_bytes // width
    constants: dict[str, Any] = {"BLOCK": _COPY_BLOCK, "num_warps": 4}
    words = cache.view(-1).view(_WORDS[width])
    grid = (block_pairs.shape[0], triton.cdiv(num_words, _COPY_BLOCK))
    _copy_kernel[grid](words, block_pairs.contiguous(), num_words, **constants)


def num_warps_for(num_elements: int) -> int:
    """Return the warps of a program with ``num_elements``: 16 elements per thread, at most 512 threads."""
    return min(16, max(1, num_elements // 512))


def with_plain_rows(heads: Tensor) -> Tensor:
    """Return ``heads`` with a contiguous last axis; copy only if necessary."""
    return heads if heads.stride(2) == 1 else heads.contiguous()


@triton.jit
def to_cache(heads, scale, DTYPE: tl.constexpr):
    """Convert ``heads`` to a cache of ``DTYPE``: unscaled, or ``saturate(heads / scale)`` for eight bits."""
    if tl.float8e4nv == DTYPE:
        stored = _saturated(heads, scale, 448.0).to(tl.float8e4nv)
    elif tl.float8e5 == DTYPE:
        stored = _saturated(heads, scale, 57344.0).to(tl.float8e5)
    else:
        stored = heads.to(DTYPE)
    return stored


@triton.jit
def _saturated(heads, scale, largest):
    """Return ``heads / scale`` in float32, clamped to ``largest`` in magnitude."""
    scaled = tl.div_rn(heads.to(tl.float32), scale)
    # Not tl.clamp, which turns NaN into a number.
    scaled = tl.where(scaled > largest, largest, scaled)
    return tl.where(scaled < -largest, -largest, scaled)


@triton.jit
def store_heads(
    heads,
    cache,
    slot,
    token_stride,
    head_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the heads of this program's token into ``slot``, unless it is negative.

    ``scale`` is a number, or for an int8 cache a pointer to its scales.
    """
    rows = tl.arange(0, HEAD_BLOCK)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    num_heads = tl.where(slot >= 0, NUM_HEADS, 0)
    mask = (rows < num_heads) & (columns < DIM)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.load(heads + token * token_stride + rows * head_stride + columns, mask=mask, other=0.0)
    heads_before = slot.to(tl.int64) * NUM_HEADS + rows
    if tl.int8 == cache.dtype.element_ty:
        stored, scales = _to_bytes(tile, HEAD_BLOCK, BLOCK)
        num_scales: tl.constexpr = (DIM + _SCALED_DIMS - 1) // _SCALED_DIMS
        places = tl.arange(0, scales.shape[1])[None, :]
        tl.store(scale + heads_before * num_scales + places, scales, mask=(rows < num_heads) & (places < num_scales))
    else:
        stored = to_cache(tile, scale, cache.dtype.element_ty)
    tl.store(cache + heads_before * DIM + columns, stored, mask=mask)


@triton.jit
def _to_bytes(heads, HEAD_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """Return heads ``[HEAD_BLOCK, BLOCK]`` as int8, and the scales of their blocks of 32 dimensions in bfloat16."""
    width: tl.constexpr = min(_SCALED_DIMS, BLOCK)
    blocks = tl.reshape(heads.to(tl.float32), [HEAD_BLOCK, BLOCK // width, width])
    # The sum is NaN if a number is NaN or infinite; a maximum ignores NaN.
    poison = tl.sum(blocks * 0.0, 2)
    scales = (tl.div_rn(tl.max(tl.abs(blocks), 2), poison + _INT8_LARGEST)).to(tl.bfloat16)
    wide = scales.to(tl.float32)
    is_usable = (wide > 0.0) & (poison == 0.0)
    steps = tl.floor(tl.div_rn(blocks, tl.where(is_usable, wide, 1.0)[:, :, None]) + 0.5)
    steps = tl.where(is_usable[:, :, None], steps, 0.0)
    # The scale may have been rounded down.
    steps = tl.minimum(tl.maximum(steps, -_INT8_LARGEST), _INT8_LARGEST)
    return tl.reshape(steps, [HEAD_BLOCK, BLOCK]).to(tl.int8), scales


@triton.jit
def _store_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_scale,
    value_scale,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    slot = tl.load(slot_mapping + tl.program_id(0))
    store_heads(
        key, key_cache, slot, key_token_stride, key_head_stride, key_scale, NUM_HEADS, KEY_DIM, HEAD_BLOCK, KEY_BLOCK
    )
    store_heads(
        value,
        value_cache,
        slot,
        value_token_stride,
        value_head_stride,
        value_scale,
        NUM_HEADS,
        VALUE_DIM,
        HEAD_BLOCK,
        VALUE_BLOCK,
    )


@triton.jit
def _copy_kernel(words, block_pairs, num_words, BLOCK: tl.constexpr):
    pair = block_pairs + tl.program_id(0) * 2
    source = tl.load(pair).to(tl.int64)
    target = tl.load(pair + 1).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < tl.where((source >= 0) & (target >= 0), num_words, 0)
    tl.store(words + target * num_words + columns, tl.load(words + source * num_words + columns, mask=mask), mask=mask)
