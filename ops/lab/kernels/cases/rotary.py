"""Heads of an 8B model, rotated alone and rotated while they are stored in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from .....kernels.kv_cache import CacheSlots
from .....kernels.rotary import apply_rotary, reference, rotary_and_store
from . import Case, Setting

_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 32, 8, 128, 16


def cases(setting: Setting) -> Iterator[Case]:
    """Yield cases from one request's decode to a prefill."""
    for num_tokens in setting.choose(on_gpu=[1, 64, 8192], on_cpu=[16]):
        heads = setting.random(num_tokens, _NUM_HEADS + 2 * _NUM_KV_HEADS, _HEAD_DIM)
        angles = setting.random(num_tokens, _HEAD_DIM // 2).float().repeat(1, 2)
        inputs = (heads, angles.cos().to(heads.dtype), angles.sin().to(heads.dtype))
        yield _rotary_case(setting, num_tokens, inputs)
        yield _store_case(setting, num_tokens, inputs)


def _rotary_case(setting: Setting, num_tokens: int, inputs: tuple[Tensor, Tensor, Tensor]) -> Case:
    def rotate(function: Callable[[Tensor, Tensor, Tensor], Tensor], *inputs: Tensor) -> Tensor:
        heads, cos, sin = inputs
        return function(heads[:, :-_NUM_KV_HEADS], cos, sin)

    truth = partial(rotate, reference.apply_rotary)
    num_elements = 2 * num_tokens * (_NUM_HEADS + _NUM_KV_HEADS) * _HEAD_DIM
    return Case(
        shape=f"T={num_tokens} H={_NUM_HEADS}+{_NUM_KV_HEADS} D={_HEAD_DIM}",
        dtype=inputs[0].dtype,
        inputs=inputs,
        run=partial(rotate, apply_rotary),
        truth=truth,
        rivals={"torch": truth, **setting.compiled(truth)},
        num_bytes=(num_elements + 2 * num_tokens * _HEAD_DIM) * inputs[0].itemsize,
    )


def _store_case(setting: Setting, num_tokens: int, inputs: tuple[Tensor, Tensor, Tensor]) -> Case:
    shape = (max(64, 2 * num_tokens // _BLOCK_SIZE), _BLOCK_SIZE, _NUM_KV_HEADS, _HEAD_DIM)
    caches = [torch.zeros(shape, dtype=inputs[0].dtype, device=setting.device) for _ in range(2)]
    slots = setting.distinct(shape[0] * shape[1], num_tokens, torch.int64)

    def store(function: Callable[..., Tensor], targets: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        heads, cos, sin = inputs
        query_key, value = heads[:, :-_NUM_KV_HEADS], heads[:, -_NUM_KV_HEADS:]
        return (function(query_key, value, cos, sin, *targets, slots), *targets)

    def truth(*inputs: Tensor) -> tuple[Tensor, ...]:
        return store(_rotate_and_store_by_reference, [cache.double() for cache in caches], *inputs)

    num_read = num_tokens * (_NUM_HEADS + 2 * _NUM_KV_HEADS) * _HEAD_DIM
    return Case(
        shape=f"and store T={num_tokens} H={_NUM_HEADS}+{_NUM_KV_HEADS} D={_HEAD_DIM}",
        dtype=inputs[0].dtype,
        inputs=inputs,
        run=partial(store, rotary_and_store, caches),
        truth=truth,
        rivals={"torch": partial(store, _rotate_and_store_by_reference, caches)},
        num_bytes=(2 * num_read + 2 * num_tokens * _HEAD_DIM) * inputs[0].itemsize + slots.nbytes,
    )


def _rotate_and_store_by_reference(
    query_key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> Tensor:
    return reference.rotary_and_store(query_key, value, cos, sin, CacheSlots(key_cache, value_cache, slots))
