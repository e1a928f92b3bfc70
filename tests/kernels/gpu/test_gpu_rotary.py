"""The Triton kernels of the rotation against their references in float64, and the write after it bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels.kv_cache import CacheSlots
from penstock.kernels.kv_cache import reference as kv_cache_reference
from penstock.kernels.rotary import gpu, reference

from .sizes import many

pytestmark = pytest.mark.usefixtures("poisoned_memory")

Compare = Callable[[Tensor, Tensor], None]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# (tokens, heads, head dim, rotated part of it); the last two leave some of a head as it is.
ODD_SHAPES = [
    (1, 1, 2, 2),
    (9, 7, 42, 42),
    (many(63, 9), 5, 128, 128),
    (many(7, 2), 40, 128, 128),
    (5, 3, 80, 32),
    (5, 3, 10, 6),
]


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, float("nan"), device=device).to(dtype)


def angles_of(num_tokens: int, rotary_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = random(num_tokens, rotary_dim // 2, dtype=torch.float32, device=device).repeat(1, 2) * 3
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim", "rotary_dim"), ODD_SHAPES)
def test_apply_rotary(
    *,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    assert_close: Compare,
) -> None:
    fused = random(num_tokens, num_heads + 2, head_dim, dtype=dtype, device=device)
    cos, sin = angles_of(num_tokens, rotary_dim, dtype, device)
    for heads in (fused[:, 1:-1], fused[:, 1:-1].contiguous(), fused.transpose(1, 2).contiguous().transpose(1, 2)):
        rotated = gpu.apply_rotary(heads, cos, sin)
        assert rotated.is_contiguous()
        assert_close(rotated, reference.apply_rotary(heads.double(), cos.double(), sin.double()))
        assert torch.equal(rotated[..., rotary_dim:], heads[..., rotary_dim:])
        interleaved = gpu.apply_rotary(heads, cos, sin, is_interleaved=True)
        assert_close(interleaved, reference.apply_rotary(heads.double(), cos.double(), sin.double(), True))


@pytest.mark.parametrize("cache_dtype", [None, FP8, E5M2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 2), (3, 3), (40, 8)])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "value_dim"), [(64, 64, 64), (24, 10, 7)])
def test_rotary_and_store(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    device: torch.device,
    assert_close: Compare,
) -> None:
    num_tokens, num_blocks, block_size = 7, 4, 3
    query_key = random(num_tokens, num_heads + num_kv_heads + 2, head_dim, dtype=dtype, device=device)[:, 1:-1]
    value = random(num_tokens, num_kv_heads + 1, value_dim, dtype=dtype, device=device)[:, 1:]
    cos, sin = angles_of(num_tokens, rotary_dim, dtype, device)
    slots = torch.tensor([7, -1, 0, 11, 3, -1, 8], dtype=torch.int32, device=device)
    scales = (0.25, 2.0) if cache_dtype else (1.0, 1.0)
    result, expected = (
        [
            poisoned(num_blocks, block_size, num_kv_heads, dim, dtype=cache_dtype or dtype, device=device)
            for dim in (head_dim, value_dim)
        ]
        for _ in range(2)
    )
    query = gpu.rotary_and_store(query_key, value, cos, sin, CacheSlots(result[0], result[1], slots, *scales))
    rotated = gpu.apply_rotary(query_key, cos, sin)
    kv_cache_reference.store_kv_cache(
        rotated[:, num_heads:], value, CacheSlots(expected[0], expected[1], slots, *scales)
    )
    assert torch.equal(query, rotated[:, :num_heads])
    assert_close(rotated, reference.apply_rotary(query_key.double(), cos.double(), sin.double()))
    for ours, theirs in zip(result, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_rotary_and_store_in_bytes(device: torch.device) -> None:
    query_key, value = (random(4, heads, 64, dtype=torch.bfloat16, device=device) for heads in (6, 2))
    cos, sin = angles_of(4, 64, torch.bfloat16, device)
    slots = torch.tensor([5, -1, 0, 3], device=device)
    result, expected = (
        [torch.zeros(2, 3, 2, dim, dtype=kind, device=device) for dim, kind in ((64, torch.int8), (2, torch.bfloat16))]
        for _ in range(2)
    )
    values, scales = (torch.zeros_like(cache) for cache in result)
    into, other = (CacheSlots(keys, values, slots, of_keys, scales) for keys, of_keys in (result, expected))
    query = gpu.rotary_and_store(query_key, value, cos, sin, into)
    rotated = gpu.apply_rotary(query_key, cos, sin)
    kv_cache_reference.store_kv_cache(rotated[:, 4:], value, other)
    assert torch.equal(query, rotated[:, :4])
    for ours, theirs in zip(result, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_the_reference_is_the_composition(device: torch.device) -> None:
    query_key, value = (random(3, heads, 8, dtype=torch.float32, device=device) for heads in (5, 2))
    cos, sin = angles_of(3, 8, torch.float32, device)
    slots = torch.tensor([2, 0, -1], device=device)
    result, expected = ([torch.zeros(1, 3, 2, 8, device=device) for _ in range(2)] for _ in range(2))
    query = reference.rotary_and_store(query_key, value, cos, sin, CacheSlots(result[0], result[1], slots))
    rotated = reference.apply_rotary(query_key, cos, sin)
    kv_cache_reference.store_kv_cache(rotated[:, 3:], value, CacheSlots(expected[0], expected[1], slots))
    assert torch.equal(query, rotated[:, :3])
    for ours, theirs in zip(result, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_token_has_the_same_bits_in_any_batch(device: torch.device) -> None:
    heads = random(63, 6, 20, dtype=torch.float32, device=device)
    cos, sin = angles_of(63, 20, torch.float32, device)
    rotated = gpu.apply_rotary(heads, cos, sin)
    for first, last in ((0, 1), (17, 18), (5, 22)):
        part = slice(first, last)
        assert torch.equal(gpu.apply_rotary(heads[part], cos[part], sin[part]), rotated[part])
        keys, values = (torch.zeros(2, 32, 2, 20, device=device) for _ in range(2))
        slots = torch.arange(last - first, device=device)
        query = gpu.rotary_and_store(
            heads[part], heads[part, 4:], cos[part], sin[part], CacheSlots(keys, values, slots)
        )
        assert torch.equal(query, rotated[part, :4])
        assert torch.equal(keys.flatten(0, 1)[: last - first], rotated[part, 4:])


def test_no_tokens(device: torch.device) -> None:
    heads, angles = torch.empty(0, 3, 4, device=device), torch.empty(0, 4, device=device)
    cache = torch.ones(2, 3, 1, 4, device=device)
    slots = torch.empty(0, dtype=torch.int64, device=device)
    assert gpu.apply_rotary(heads, angles, angles).shape == (0, 3, 4)
    query = gpu.rotary_and_store(heads, heads[:, :1], angles, angles, CacheSlots(cache, cache, slots))
    assert query.shape == (0, 2, 4)
    assert cache.eq(1).all()
