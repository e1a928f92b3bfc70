"""The launches that ``compile_for_hopper`` compiles: each launcher of a Triton kernel, in ways that lead to other
machine code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.gated_activation import gpu as gated_activation
from penstock.kernels.kv_cache import CacheSlots, scales_per_head
from penstock.kernels.kv_cache import gpu as kv_cache
from penstock.kernels.lora import gpu as lora
from penstock.kernels.moe import gpu as moe
from penstock.kernels.normed_linear import gpu as normed_linear
from penstock.kernels.paged_attention import PagedBatch
from penstock.kernels.paged_attention import gpu as paged_attention
from penstock.kernels.paged_attention.batch import Variant
from penstock.kernels.penalties import gpu as penalties
from penstock.kernels.quantized_linear import gpu as quantized_linear
from penstock.kernels.rms_norm import gpu as rms_norm
from penstock.kernels.rotary import gpu as rotary
from penstock.kernels.sampling import Draws
from penstock.kernels.sampling import gpu as sampling

BF16, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
PER_HEAD = torch.zeros(32)
EVERYTHING = {"window": 128, "softcap": 30.0, "sinks": PER_HEAD, "alibi_slopes": PER_HEAD}

# dtype, heads, key/value heads, D, DV, the cache's dtype, options: all features at once, and the heads of Qwen3, Phi,
# Gemma and latent attention.
ATTENTION_SHAPES: list[tuple[torch.dtype, int, int, int, int, torch.dtype, dict[str, Any]]] = [
    (torch.float16, 32, 8, 64, 64, torch.float16, EVERYTHING),
    (BF16, 32, 8, 128, 128, BF16, {}),
    (BF16, 32, 8, 128, 128, FLOAT8, {}),
    (BF16, 32, 8, 128, 128, torch.float8_e5m2, {}),
    (BF16, 32, 8, 128, 128, torch.int8, {}),
    (BF16, 32, 32, 80, 80, BF16, {"window": 4096}),
    (BF16, 8, 4, 256, 256, BF16, {"softcap": 50.0}),
    (BF16, 128, 1, 576, 512, BF16, {}),
    (torch.float32, 32, 8, 128, 128, torch.float32, {}),
]

# D, and the part of it that is rotated.
HEAD_DIMS = ((128, 128), (80, 32))

Launch = Callable[[], Any]


def all_launches(*, is_brief: bool) -> Iterator[Launch]:
    """Yield launches of every package: every kernel if ``is_brief``, else also all of their variants."""
    yield from layer_launches([BF16] if is_brief else [torch.float32, BF16], [1000] if is_brief else [128, 1000, 32768])
    for dtype, (head_dim, rotary_dim) in [(BF16, (80, 32))] if is_brief else product((torch.float32, BF16), HEAD_DIMS):
        yield from head_launches(dtype, head_dim, rotary_dim, is_brief=is_brief)
    yield from attention_launches(num_shapes=1 if is_brief else len(ATTENTION_SHAPES))
    yield from (sample_rows, penalize_rows, mix_experts, multiply_bytes, adapt)


def layer_launches(dtypes: list[torch.dtype], sizes: list[int]) -> Iterator[Launch]:
    """Yield launches with sizes that are powers of two, and others."""
    for dtype in dtypes:
        for size in sizes:
            rows, weight = torch.zeros(3, size, dtype=dtype), torch.zeros(size, dtype=dtype)
            yield lambda rows=rows, weight=weight: rms_norm.rms_norm(rows, weight, 1e-6)
            yield lambda rows=rows, weight=weight: rms_norm.rms_norm(rows, weight.float(), 1e-6)
            yield lambda rows=rows, weight=weight: rms_norm.add_rms_norm(rows, rows.clone(), weight, 1e-6)
        for size, activation in zip(sizes[:2], cycle((None, "silu")), strict=False):
            yield lambda size=size, dtype=dtype, activation=activation: enter(size, dtype, activation)
        yield lambda dtype=dtype: enter(sizes[-1], dtype, "gelu_tanh")
        gate_up = torch.zeros(3, 6000, dtype=dtype)
        yield lambda gate_up=gate_up: gated_activation.silu_and_mul(gate_up)
        yield lambda gate_up=gate_up: gated_activation.gelu_and_mul(gate_up, "none")
        yield lambda gate_up=gate_up: gated_activation.gelu_and_mul(gate_up, "tanh")
    for last in (8, 3):
        cache = torch.zeros(9, 1, 1, last, dtype=BF16)
        yield lambda cache=cache: kv_cache.copy_blocks(cache, torch.zeros(2, 2, dtype=torch.int32))


def enter(size: int, dtype: torch.dtype, activation: str | None) -> None:
    """Launch the product of a layer's entry, with a bias unless it is gated."""
    rows, weight = torch.zeros(3, size, dtype=dtype), torch.zeros(600, size, dtype=dtype)
    bias = torch.zeros(600, dtype=dtype) if activation is None else None
    normed_linear.normed_linear(rows, rows, weight[0], 1e-6, weight, bias, activation)


def head_launches(dtype: torch.dtype, head_dim: int, rotary_dim: int, *, is_brief: bool) -> Iterator[Launch]:
    """Yield launches with each dtype of caches and each of slots: all pairs of them, or if ``is_brief`` some."""
    cache_dtypes, slot_dtypes = (dtype, FLOAT8, torch.float8_e5m2, torch.int8), (torch.int32, torch.int64)
    pairs = zip(cache_dtypes, cycle(slot_dtypes), strict=False) if is_brief else product(cache_dtypes, slot_dtypes)
    heads = torch.zeros(3, 48, head_dim, dtype=dtype)
    query_key, value = heads.split([40, 8], dim=1)
    angles = torch.zeros(3, rotary_dim, dtype=dtype)
    yield lambda: rotary.apply_rotary(query_key, angles, angles)
    yield lambda: rotary.apply_rotary(query_key, angles, angles, is_interleaved=True)
    for cache_dtype, slot_dtype in pairs:
        cache = torch.zeros(4, 16, 8, head_dim, dtype=cache_dtype)
        scales = _scales_of({"key_scale": cache, "value_scale": cache})
        into = CacheSlots(cache, cache, torch.zeros(3, dtype=slot_dtype), **scales)
        yield lambda into=into: kv_cache.store_kv_cache(value, value, into)
        yield lambda into=into: rotary.rotary_and_store(query_key, value, angles, angles, into)


def _scales_of(caches: dict[str, Tensor]) -> dict[str, Any]:
    """Return the scales of caches if they are in int8."""
    return {
        name: torch.zeros(*cache.shape[:3], scales_per_head(cache.shape[3]), dtype=BF16)
        for name, cache in caches.items()
        if cache.dtype == torch.int8
    }


def attention_launches(num_shapes: int) -> Iterator[Launch]:
    """The first of ``ATTENTION_SHAPES``."""
    for dtype, num_heads, num_kv_heads, key_dim, value_dim, cache_dtype, options in ATTENTION_SHAPES[:num_shapes]:
        key_cache = torch.zeros(2, 16, num_kv_heads, key_dim, dtype=cache_dtype)
        value_cache = torch.zeros(2, 16, num_kv_heads, value_dim, dtype=cache_dtype)
        table = torch.zeros(2, 512, dtype=torch.int32)
        batch = PagedBatch(table, torch.zeros(0), [1, 500], [8192, 8000], 16)
        inputs = (torch.zeros(501, num_heads, key_dim, dtype=dtype), key_cache, value_cache, batch)
        variant = Variant(0.1, **options, **_scales_of({"key_scale": key_cache, "value_scale": value_cache}))
        yield partial(paged_attention.paged_attention, *inputs, variant)
        yield partial(paged_attention.invariant_paged_attention, *inputs, variant)


def sample_rows() -> None:
    """Few rows of a small vocabulary, many of a large one."""
    for num_rows, vocab_size, dtype in ((3, 1000, torch.float32), (16, 151_936, BF16)):
        ones, zeros = torch.ones(num_rows), torch.zeros(num_rows)
        draws = Draws(ones, zeros.long(), ones, zeros, zeros.double())
        sampling.sample(torch.empty(num_rows, vocab_size, dtype=dtype), draws)


def penalize_rows() -> None:
    """Launch one shape, since the compiler specializes on none of it."""
    places, changes = torch.zeros(5, dtype=torch.int64), torch.ones(5)
    penalties.penalize(torch.zeros(4, 100), places, places, changes, changes)


def mix_experts() -> None:
    """Launch with one token, and with many."""
    for num_tokens in (1, 300):
        weights, ids = moe.route(torch.empty(num_tokens, 8, dtype=BF16), 2, "sigmoid", True, torch.empty(8), 1.0)
        gate_up, down = torch.empty(8, 512, 256, dtype=BF16), torch.empty(8, 256, 256, dtype=BF16)
        moe.experts(torch.empty(num_tokens, 256, dtype=BF16), gate_up, down, weights, ids)


def multiply_bytes() -> None:
    """Launch with both dtypes, with one token and with many."""
    for kind in (torch.int8, FLOAT8):
        for num_tokens in (1, 300):
            rows, scales = quantized_linear.quantize_rows(torch.empty(num_tokens, 512, dtype=BF16), kind)
            values, bias = torch.empty(256, 512, dtype=kind), torch.empty(256, dtype=BF16)
            quantized_linear.multiply(rows, scales, values, torch.empty(256), bias, BF16)


def adapt() -> None:
    """A low-rank adapter for each token."""
    token_lora = torch.zeros(40, dtype=torch.int32)
    small = lora.lora_shrink(torch.empty(40, 1000, dtype=BF16), torch.empty(4, 16, 1000, dtype=BF16), token_lora)
    lora.lora_expand(small, torch.empty(4, 512, 16, dtype=BF16), token_lora, torch.empty(40, 512, dtype=BF16), 1.0)
