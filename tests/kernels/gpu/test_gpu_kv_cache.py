"""The Triton kernels that write into the paged cache: bit for bit, and into nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.kv_cache import CacheSlots, gpu, reference, scales_per_head

from .sizes import many

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NUM_BLOCKS, BLOCK_SIZE = 13, 5


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def make_slots(num_tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(num_tokens))[:num_tokens]
    slots[3::4] = -1
    return slots.to(device, dtype)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, float("nan"), device=device).to(dtype)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_tokens", [1, 7, many(63, 18)])
@pytest.mark.parametrize("cache_dtype", [None, FP8, E5M2])
def test_tokens_land_in_their_slots_and_nothing_else_is_touched(
    num_tokens: int, slot_dtype: torch.dtype, dtype: torch.dtype, cache_dtype: torch.dtype | None, device: torch.device
) -> None:
    num_heads, key_dim, value_dim = 3, 8, 6
    fused = random(num_tokens, num_heads + 2, key_dim + value_dim, dtype=dtype, device=device)
    key, value = fused[:, 1:-1, :key_dim], fused[:, 1:-1, key_dim:]
    slots = make_slots(num_tokens, slot_dtype, device)
    result, expected = (
        [
            poisoned(NUM_BLOCKS, BLOCK_SIZE, num_heads, dim, dtype=cache_dtype or dtype, device=device)
            for dim in (key_dim, value_dim)
        ]
        for _ in range(2)
    )
    scales = (0.5, 0.03) if cache_dtype else (1.0, 1.0)
    gpu.store_kv_cache(key, value, CacheSlots(result[0], result[1], slots, *scales))
    reference.store_kv_cache(key, value, CacheSlots(expected[0], expected[1], slots, *scales))
    for ours, theirs in zip(result, expected, strict=True):
        assert torch.equal(bytes_of(ours), bytes_of(theirs))


def empty_bytes(num_heads: int, dims: tuple[int, int], device: torch.device) -> list[Tensor]:
    """Return keys and values in int8, and their scales, poisoned."""
    shape = NUM_BLOCKS, BLOCK_SIZE, num_heads
    scales = [poisoned(*shape, scales_per_head(dim), dtype=torch.bfloat16, device=device) for dim in dims]
    return [*(torch.full((*shape, dim), 77, dtype=torch.int8, device=device) for dim in dims), *scales]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(8, 6), (80, 64)])
def test_bytes_and_scales_are_those_of_the_reference(
    dims: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    key, value = (random(9, 3, dim, dtype=dtype, device=device) for dim in dims)
    key[1, 1] = 0.0
    slots = make_slots(9, torch.int64, device)
    result, expected = (empty_bytes(3, dims, device) for _ in range(2))
    for store, caches in ((gpu.store_kv_cache, result), (reference.store_kv_cache, expected)):
        store(key, value, CacheSlots(caches[0], caches[1], slots, caches[2], caches[3]))
    for ours, theirs in zip(result, expected, strict=True):
        assert torch.equal(bytes_of(ours), bytes_of(theirs))
    key[0, 0, 3] = float("nan")
    gpu.store_kv_cache(key, value, CacheSlots(result[0], result[1], slots, result[2], result[3]))
    assert result[2].flatten(0, 1)[slots[0], 0, 0].isnan()


@pytest.mark.parametrize(("kind", "largest"), [(FP8, 448), (E5M2, 57344)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_eight_bits_saturate_and_keep_nan(
    dtype: torch.dtype, kind: torch.dtype, largest: int, device: torch.device
) -> None:
    numbers = [0.0, -0.0, 2**-10, 2**-9, 447.0, 448.0, 449.0, 480.0, -6e4, 6e4, float("inf"), -float("inf")]
    key = torch.tensor([[[*numbers, float("nan")]]], dtype=dtype, device=device)
    result, expected = (torch.zeros(1, 1, 1, 13, dtype=kind, device=device) for _ in range(2))
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    gpu.store_kv_cache(key, key, CacheSlots(result, result, slot))
    reference.store_kv_cache(key, key, CacheSlots(expected, expected, slot))
    assert result.float()[..., 5:-1].abs().max() == largest
    assert result.float()[..., -1].isnan().all()
    assert torch.equal(bytes_of(result), bytes_of(expected))


def test_a_token_of_any_strides(device: torch.device) -> None:
    """The last axis may be anything, too: then it is copied first."""
    key = random(4, 8, 2, dtype=torch.float32, device=device).transpose(1, 2)
    result, expected = (torch.zeros(2, 4, 2, 8, device=device) for _ in range(2))
    slots = torch.tensor([3, 0, 7, 4], device=device)
    gpu.store_kv_cache(key, key, CacheSlots(result, result.clone(), slots))
    reference.store_kv_cache(key, key, CacheSlots(expected, expected.clone(), slots))
    assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [*DTYPES, FP8])
@pytest.mark.parametrize("shape", [(2, 3, 8), (1, 1, 3), (5, 7, 64)])
def test_blocks_are_copied(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    result = random(9, *shape, dtype=torch.float32, device=device).to(dtype)
    expected = result.clone()
    pairs = torch.tensor([[0, 5], [-1, 6], [3, 8], [0, 1], [4, -1]], dtype=torch.int32, device=device)
    for source, target in ((0, 5), (3, 8), (0, 1)):
        bytes_of(expected)[target] = bytes_of(expected)[source]
    by_reference = result.clone()
    gpu.copy_blocks(result, pairs)
    reference.copy_blocks(by_reference, pairs)
    assert torch.equal(bytes_of(result), bytes_of(expected))
    assert torch.equal(bytes_of(by_reference), bytes_of(expected))


def test_nothing_to_do(device: torch.device) -> None:
    cache = torch.ones(2, 3, 1, 4, device=device)
    nothing = torch.empty(0, 1, 4, device=device)
    gpu.store_kv_cache(nothing, nothing, CacheSlots(cache, cache, torch.empty(0, dtype=torch.int64, device=device)))
    gpu.copy_blocks(cache, torch.empty(0, 2, dtype=torch.int64, device=device))
    assert cache.eq(1).all()
