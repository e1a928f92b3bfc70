"""Writing into the paged cache, bit for bit."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.errors import KernelInputError
from penstock.kernels.kv_cache import store_kv_cache


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
