"""Triton kernels for the GPU: a program per token and group of heads; pairs are rotated in float32 and rounded once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_cache.cache_slots import CacheSlots
from ..kv_cache.gpu import num_warps_for, store_heads, store_kv_cache, to_cache, with_plain_rows

_MAX_BLOCK = 2048


def apply_rotary(heads: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool = False) -> Tensor:
    """See ``rotary.apply_rotary``."""
    num_tokens, num_heads, head_dim = heads.shape
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    if out.numel() == 0:
        return out
    heads = with_plain_rows(heads)
    blocks = _Blocks(num_heads, head_dim, cos.shape[1])
    _rotary_kernel[(num_tokens, triton.cdiv(num_heads, blocks.heads))](
        heads, cos.contiguous(), sin.contiguous(), out, heads.stride(0), heads.stride(1),
        **{**blocks.constants, "NUM_HEADS": num_heads, "IS_INTERLEAVED": is_interleaved},
    )  # fmt: skip
    return out


def rotary_and_store(
    query_key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, target: CacheSlots, is_interleaved: bool = False
) -> Tensor:
    """See ``rotary.rotary_and_store``."""
    num_tokens, num_all, head_dim = query_key.shape
    num_kv_heads, value_dim = value.shape[1:]
    num_heads = num_all - num_kv_heads
    if target.key_cache.dtype == torch.int8:
        # A scale belongs to 32 adjacent dimensions, which may lie on both sides of the pairs that rotate.
        rotated = apply_rotary(query_key, cos, sin, is_interleaved)
        store_kv_cache(rotated[:, num_heads:], value, target)
        return rotated[:, :num_heads]
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=query_key.dtype, device=query_key.device)
    if num_tokens == 0:
        return query
    query_key, value = with_plain_rows(query_key), with_plain_rows(value)
    blocks = _Blocks(num_all, head_dim, cos.shape[1])
    num_groups = triton.cdiv(num_all, blocks.heads)
    constants: dict[str, Any] = {
        **blocks.constants,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "NUM_GROUPS": num_groups,
        "VALUE_DIM": value_dim,
        "VALUE_HEAD_BLOCK": triton.next_power_of_2(num_kv_heads),
        "VALUE_BLOCK": triton.next_power_of_2(value_dim),
        "IS_INTERLEAVED": is_interleaved,
    }
    # After the groups of query and key heads, one more program stores a token's values.
    _rotary_and_store_kernel[(num_tokens, num_groups + 1)](
        query_key, value, cos.contiguous(), sin.contiguous(), query, target.key_cache, target.value_cache,
        target.slot_mapping.contiguous(),
        query_key.stride(0), query_key.stride(1), value.stride(0), value.stride(1),
        target.key_scale, target.value_scale,
        **constants,
    )  # fmt: skip
    return query


class _Blocks:
    """Division of heads into programs. It depends on their sizes only, never on the number of tokens."""

    def __init__(self, num_heads: int, head_dim: int, rotary_dim: int) -> None:
        half, rest = triton.next_power_of_2(rotary_dim // 2), head_dim - rotary_dim
        rest_block = triton.next_power_of_2(rest) if rest else 0
        width = max(2 * half, rest_block)
        self.heads = min(triton.next_power_of_2(num_heads), max(1, _MAX_BLOCK // width))
        self.constants: dict[str, Any] = {
            "HEAD_DIM": head_dim,
            "ROTARY_DIM": rotary_dim,
            "HEAD_BLOCK": self.heads,
            "HALF_BLOCK": half,
            "REST_BLOCK": rest_block,
            "num_warps": num_warps_for(self.heads * width),
        }


@triton.jit
def _pair_columns(pairs, ROTARY_DIM: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """Return the columns of the first and second elements of pairs within a head."""
    if IS_INTERLEAVED:
        first, second = 2 * pairs, 2 * pairs + 1
    else:
        first, second = pairs, ROTARY_DIM // 2 + pairs
    return first, second


@triton.jit
def _rotated(heads, cos, sin, token, starts, mask, columns, ROTARY_DIM: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """Return the rotated pairs of heads that begin at ``starts``, first and second elements, in float32.

    ``columns`` are indices of pairs.
    """
    angles = token * ROTARY_DIM + columns
    angles_mask = columns < ROTARY_DIM // 2
    cosines = tl.load(cos + angles, mask=angles_mask, other=0.0).to(tl.float32)
    sines = tl.load(sin + angles, mask=angles_mask, other=0.0).to(tl.float32)
    first_columns, second_columns = _pair_columns(columns, ROTARY_DIM, IS_INTERLEAVED)
    first = tl.load(heads + starts + first_columns, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads + starts + second_columns, mask=mask, other=0.0).to(tl.float32)
    return first * cosines - second * sines, second * cosines + first * sines


@triton.jit
def _rotary_kernel(
    heads,
    cos,
    sin,
    out,
    token_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    dtype = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    rows = (tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK))[:, None]
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    starts = token * token_stride + rows * head_stride
    out_starts = (token * NUM_HEADS + rows) * HEAD_DIM
    mask = (rows < NUM_HEADS) & (columns < ROTARY_DIM // 2)
    first, second = _rotated(heads, cos, sin, token, starts, mask, columns, ROTARY_DIM, IS_INTERLEAVED)
    first_columns, second_columns = _pair_columns(columns, ROTARY_DIM, IS_INTERLEAVED)
    tl.store(out + out_starts + first_columns, first.to(dtype), mask=mask)
    tl.store(out + out_starts + second_columns, second.to(dtype), mask=mask)
    if REST_BLOCK > 0:
        rest = ROTARY_DIM + tl.arange(0, REST_BLOCK)[None, :]
        rest_mask = (rows < NUM_HEADS) & (rest < HEAD_DIM)
        tl.store(out + out_starts + rest, tl.load(heads + starts + rest, mask=rest_mask), mask=rest_mask)


@triton.jit
def _rotary_and_store_kernel(
    query_key, value, cos, sin, query, key_cache, value_cache, slot_mapping,
    token_stride, head_stride, value_token_stride, value_head_stride, key_scale, value_scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_HEAD_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Run program ``(token, group of query and key heads)``. The program after the groups stores the token's values."""
    slot = tl.load(slot_mapping + tl.program_id(0)).to(tl.int64)
    if tl.program_id(1) == NUM_GROUPS:
        store_heads(
            value, value_cache, slot, value_token_stride, value_head_stride, value_scale,
            NUM_KV_HEADS, VALUE_DIM, VALUE_HEAD_BLOCK, VALUE_BLOCK,
        )  # fmt: skip
    else:
        _rotate_group(
            query_key, cos, sin, query, key_cache, slot, token_stride, head_stride, key_scale,
            NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, ROTARY_DIM, HEAD_BLOCK, HALF_BLOCK, REST_BLOCK, IS_INTERLEAVED,
        )  # fmt: skip


@triton.jit
def _rotate_group(
    query_key, cos, sin, query, key_cache, slot, token_stride, head_stride, key_scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate this program's heads. Write queries to ``query``, and keys to ``slot`` of the cache unless it is negative.

    A group may contain the last queries and the first keys. Masks select the target of each row.
    """
    dtype = query.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    rows = (tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK))[:, None]
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    starts = token * token_stride + rows * head_stride
    query_rows = query + (token * NUM_HEADS + rows) * HEAD_DIM
    key_rows = key_cache + (slot * NUM_KV_HEADS + rows - NUM_HEADS) * HEAD_DIM
    is_query = rows < NUM_HEADS
    is_key = (rows >= NUM_HEADS) & (rows < tl.where(slot >= 0, NUM_HEADS + NUM_KV_HEADS, 0))
    is_row = rows < NUM_HEADS + NUM_KV_HEADS
    half = columns < ROTARY_DIM // 2
    first, second = _rotated(query_key, cos, sin, token, starts, is_row & half, columns, ROTARY_DIM, IS_INTERLEAVED)
    first_columns, second_columns = _pair_columns(columns, ROTARY_DIM, IS_INTERLEAVED)
    # Rounded before they are converted to the dtype of the cache, as keys are in store_kv_cache.
    first, second = first.to(dtype), second.to(dtype)
    _store_group(query_rows, key_rows, first_columns, is_query & half, is_key & half, first, key_scale)
    _store_group(query_rows, key_rows, second_columns, is_query & half, is_key & half, second, key_scale)
    if REST_BLOCK > 0:
        rest = ROTARY_DIM + tl.arange(0, REST_BLOCK)[None, :]
        unrotated = tl.load(query_key + starts + rest, mask=is_row & (rest < HEAD_DIM), other=0.0)
        _store_group(
            query_rows, key_rows, rest, is_query & (rest < HEAD_DIM), is_key & (rest < HEAD_DIM), unrotated, key_scale
        )


@triton.jit
def _store_group(query_rows, key_rows, columns, is_query, is_key, heads, key_scale):
    """Write the query rows of ``heads``, and the key rows in the dtype of their cache."""
    tl.store(query_rows + columns, heads, mask=is_query)
    tl.store(key_rows + columns, to_cache(heads, key_scale, key_rows.dtype.element_ty), mask=is_key)
