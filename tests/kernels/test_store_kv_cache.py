"""Writing into the paged cache and copying its blocks, bit for bit."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.dispatch import KernelInputError
from penstock.kernels.kv_cache import copy_blocks, store_kv_cache


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_tokens", [1, 7, 63])
def test_tokens_land_in_their_slots_and_nothing_else_is_touched(
    num_tokens: int, slot_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    num_blocks, block_size, num_kv_heads, key_dim, value_dim = 13, 5, 3, 8, 6
    generator = torch.Generator().manual_seed(num_tokens)
    fused = torch.randn(num_tokens, num_kv_heads, key_dim + value_dim, generator=generator).to(dtype)
    key, value = fused[..., :key_dim], fused[..., key_dim:]
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].to(slot_dtype)
    slots[::4] = -1
    key_cache = poisoned(num_blocks, block_size, num_kv_heads, key_dim, dtype=dtype)
    value_cache = poisoned(num_blocks, block_size, num_kv_heads, value_dim, dtype=dtype)
    store_kv_cache(key, value, key_cache, value_cache, slots)
    for new, cache in ((key, key_cache), (value, value_cache)):
        expected = poisoned(*cache.shape, dtype=dtype)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot // block_size, slot % block_size] = new[token]
        assert torch.equal(cache.nan_to_num(1e4), expected.nan_to_num(1e4))


def test_a_cache_of_eight_bits_rounds_to_nearest_and_saturates() -> None:
    """Its numbers from 16 to 32 are the even ones; the largest is 448."""
    key = torch.tensor([[[17.1, 18.9, -1000.0, float("nan")]]], dtype=torch.bfloat16)
    value = torch.tensor([[[1e4, -3.0, 448.0, float("inf")]]], dtype=torch.bfloat16)
    key_cache, value_cache = (torch.zeros(1, 2, 1, 4, dtype=torch.float8_e4m3fn) for _ in range(2))
    store_kv_cache(key, value, key_cache, value_cache, torch.tensor([1]), key_scale=1.0, value_scale=0.5)
    assert key_cache[0, 1, 0, :3].tolist() == [18.0, 18.0, -448.0]
    assert key_cache[0, 1, 0, 3].isnan()
    assert value_cache[0, 1, 0].tolist() == [448.0, -6.0, 448.0, 448.0]
    assert not key_cache[0, 0].float().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_are_copied(dtype: torch.dtype) -> None:
    cache = torch.arange(30.0).reshape(5, 2, 1, 3).to(dtype)
    before = cache.clone()
    copy_blocks(cache, torch.tensor([[0, 3], [-1, 1], [4, 2]], dtype=torch.int32))
    for block, source in enumerate([0, 1, 4, 0, 4]):
        assert torch.equal(cache[block].float(), before[source].float())


def test_wrong_inputs_are_named() -> None:
    key = torch.zeros(2, 3, 4)
    cache = torch.zeros(5, 8, 3, 4)
    slots = torch.zeros(2, dtype=torch.int64)
    for arguments, name in (
        ((key[0], key, cache, cache, slots), "key must"),
        ((key, key, cache[..., :2], cache, slots), "key_cache"),
        ((key, key, cache, cache.bfloat16(), slots), "value_cache"),
        ((key, key, cache, cache, slots[:1]), "slot_mapping"),
    ):
        with pytest.raises(KernelInputError, match=name):
            store_kv_cache(*arguments)
    for cache_dtype, scale in ((torch.float32, 0.5), (torch.float8_e4m3fn, 0.0), (torch.float8_e5m2, 0.0)):
        other = cache.to(cache_dtype)
        with pytest.raises(KernelInputError, match="value_scale must"):
            store_kv_cache(key, key, other, other, slots, value_scale=scale)
    for arguments, name in (
        ((cache.transpose(0, 1), torch.zeros(1, 2, dtype=torch.int32)), "cache must"),
        ((cache, torch.zeros(2, dtype=torch.int32)), "block_pairs must"),
        ((cache, torch.zeros(1, 2)), "block_pairs must"),
    ):
        with pytest.raises(KernelInputError, match=name):
            copy_blocks(*arguments)
