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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [8, 40, 64])
def test_bytes_have_a_scale_for_each_32_dimensions(dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(dim)
    magnitudes = torch.tensor([1e-6, 1.0, 300.0])[:, None, None]
    heads = (torch.randn(3, 2, dim, generator=generator) * magnitudes).to(dtype)
    heads[1, 1] = 0.0
    cache = torch.zeros(2, 4, 2, dim, dtype=torch.int8)
    scales = poisoned(2, 4, 2, -(-dim // 32), dtype=torch.bfloat16)
    slots = torch.tensor([6, 1, -1])
    store_kv_cache(heads, heads, cache, cache.clone(), slots, key_scale=scales, value_scale=scales.clone())
    assert cache.flatten(0, 1)[[1, 6]].abs().amax() == 127
    for token, slot in ((0, 6), (1, 1)):
        block, offset = divmod(slot, 4)
        for part, scale in zip(range(0, dim, 32), scales[block, offset].float().unbind(-1), strict=True):
            exact = heads[token, :, part : part + 32].float()
            stored = cache[block, offset, :, part : part + 32].float() * scale[:, None]
            # Half a step, and the rounding of the scale for the largest number.
            limit = exact.abs().amax(-1, keepdim=True) * (0.5 / 127 + 2**-8)
            assert ((stored - exact).abs() <= limit).all()
    assert scales[0, 1, 1].eq(0).all()
    assert scales.flatten(0, 1)[[0, 2, 3, 4, 5, 7]].isnan().all()
    assert not cache.flatten(0, 1)[[0, 2, 3, 4, 5, 7]].any()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_makes_its_scale_so(wrong: float) -> None:
    heads = torch.ones(1, 1, 64)
    heads[0, 0, 40] = wrong
    cache, scales = torch.zeros(1, 1, 1, 64, dtype=torch.int8), torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16)
    store_kv_cache(heads, heads, cache, cache, torch.tensor([0]), key_scale=scales, value_scale=scales)
    assert scales.isfinite().flatten().tolist() == [True, False]


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
