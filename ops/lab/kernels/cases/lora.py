"""Adapters of rank 16 on a projection of 4096."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .....kernels.lora import lora_expand, lora_shrink, reference
from . import Case, Setting


def cases(setting: Setting) -> Iterator[Case]:
    for num_tokens, size in setting.choose(on_gpu=[(1, 4096), (64, 4096), (8192, 4096)], on_cpu=[(16, 256)]):
        num_adapters, rank = 8, 16
        inputs = setting.random(num_tokens, size)
        a = setting.random(num_adapters, rank, size).mul_(size**-0.5)
        b = setting.random(num_adapters, size, rank).mul_(rank**-0.5)
        token_lora = setting.integers(num_adapters, num_tokens)
        num_touched = token_lora.unique().numel()
        letters = f"T={num_tokens} NL={num_adapters} R={rank}"
        yield Case(
            shape=f"shrink {letters} K={size}",
            dtype=inputs.dtype,
            inputs=(inputs, a, token_lora),
            run=lora_shrink,
            truth=reference.lora_shrink,
            rivals={"torch, adapter by adapter": reference.lora_shrink},
            num_bytes=inputs.nbytes + num_touched * rank * size * inputs.itemsize + num_tokens * rank * 4,
            num_flop=2 * num_tokens * rank * size,
        )
        yield Case(
            shape=f"expand {letters} N={size}",
            dtype=inputs.dtype,
            inputs=(inputs, b, token_lora, setting.random(num_tokens, rank).to(torch.float32)),
            run=_expand,
            truth=_expand_by_reference,
            rivals={"torch, adapter by adapter": _expand_by_reference},
            num_bytes=2 * inputs.nbytes + num_touched * rank * size * inputs.itemsize + num_tokens * rank * 4,
            num_flop=2 * num_tokens * rank * size,
        )


def _expand(out: Tensor, b: Tensor, token_lora: Tensor, inputs: Tensor) -> Tensor:
    lora_expand(inputs, b, token_lora, out)
    return out


def _expand_by_reference(out: Tensor, b: Tensor, token_lora: Tensor, inputs: Tensor) -> Tensor:
    reference.lora_expand(inputs, b, token_lora, out, 1.0)
    return out
