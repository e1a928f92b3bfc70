"""Keys and values of one layer of an 8B model, and copies of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from .....kernels.kv_cache import FP8_DTYPES, CacheSlots, copy_blocks, reference, store_kv_cache
from . import Case, Setting

_NUM_HEADS, _HEAD_DIM, _BLOCK_SIZE = 8, 128, 16

Store = Callable[..., None]


def cases(setting: Setting) -> Iterator[Case]:
    """Yield writes of a decode and a prefill, into a cache of their dtype and of eight bits, and copies of blocks."""
    for num_tokens in setting.choose(on_gpu=[1, 256, 8192], on_cpu=[64]):
        for cache_dtype in (torch.bfloat16, FP8_DTYPES[0]):
            yield _store_case(setting, num_tokens, cache_dtype)
    for num_pairs in setting.choose(on_gpu=[16, 1024], on_cpu=[16]):
        yield _copy_case(setting, num_pairs)


def _store_case(setting: Setting, num_tokens: int, cache_dtype: torch.dtype) -> Case:
    shape = (max(64, 2 * num_tokens // _BLOCK_SIZE), _BLOCK_SIZE, _NUM_HEADS, _HEAD_DIM)
    caches = [torch.zeros(shape, dtype=cache_dtype, device=setting.device) for _ in range(2)]
    qkv = setting.random(num_tokens, 6 * _NUM_HEADS, _HEAD_DIM)
    slots = setting.distinct(shape[0] * shape[1], num_tokens, torch.int64)

    def store(function: Store, targets: list[Tensor], fused: Tensor) -> tuple[Tensor, ...]:
        key, value = fused[:, 4 * _NUM_HEADS :].split(_NUM_HEADS, dim=1)
        function(key, value, *targets, slots)
        return tuple(targets)

    def truth(fused: Tensor) -> tuple[Tensor, ...]:
        input_dtype = torch.bfloat16 if cache_dtype in FP8_DTYPES else torch.float64
        targets = [cache.to(cache_dtype if cache_dtype in FP8_DTYPES else torch.float64) for cache in caches]
        return store(_store_by_reference, targets, fused.to(input_dtype))

    num_elements = num_tokens * _NUM_HEADS * _HEAD_DIM * 2
    return Case(
        shape=f"store T={num_tokens} KVH={_NUM_HEADS} D={_HEAD_DIM} into {str(cache_dtype).removeprefix('torch.')}",
        dtype=qkv.dtype,
        inputs=(qkv,),
        run=partial(store, store_kv_cache, caches),
        truth=truth,
        rivals={"torch": partial(store, _store_by_reference, caches)},
        num_bytes=num_elements * (qkv.itemsize + cache_dtype.itemsize) + slots.nbytes,
    )


def _store_by_reference(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    reference.store_kv_cache(key, value, CacheSlots(key_cache, value_cache, slots))


def _copy_case(setting: Setting, num_pairs: int) -> Case:
    cache = setting.random(2 * num_pairs, _BLOCK_SIZE, _NUM_HEADS, _HEAD_DIM)
    pairs = setting.distinct(2 * num_pairs, 2 * num_pairs).view(-1, 2)

    def copy(function: Callable[[Tensor, Tensor], None], cache: Tensor) -> Tensor:
        function(cache, pairs)
        return cache

    return Case(
        shape=f"copy N={num_pairs} BS={_BLOCK_SIZE} KVH={_NUM_HEADS} D={_HEAD_DIM}",
        dtype=cache.dtype,
        inputs=(cache,),
        run=partial(copy, copy_blocks),
        truth=partial(copy, reference.copy_blocks),
        rivals={"torch": partial(copy, reference.copy_blocks)},
        num_bytes=2 * num_pairs * cache[0].nbytes,
    )
