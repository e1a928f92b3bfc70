"""One product of Qwen3-30B-A3B's experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from .....kernels.grouped_linear import grouped_linear, reference
from . import Case, Setting


def cases(setting: Setting) -> Iterator[Case]:
    for num_tokens, num_groups, num_each, size, num_outputs in setting.choose(
        on_gpu=[(1, 128, 8, 2048, 1536), (8192, 128, 8, 2048, 1536)], on_cpu=[(16, 8, 2, 128, 64)]
    ):
        inputs = setting.random(num_tokens, size)
        weight = setting.random(num_groups, num_outputs, size).mul_(size**-0.5)
        ids = setting.integers(num_groups, num_tokens, num_each)

        def run(inputs: Tensor, weight=weight, ids=ids) -> Tensor:
            return grouped_linear(inputs, weight, ids)

        def truth(inputs: Tensor, weight=weight, ids=ids) -> Tensor:
            return reference.grouped_linear(inputs, weight.to(inputs.dtype), ids)

        num_rows = num_tokens * num_each
        yield Case(
            shape=f"T={num_tokens} J={num_each} G={num_groups} K={size} N={num_outputs}",
            dtype=inputs.dtype,
            inputs=(inputs,),
            run=run,
            truth=truth,
            rivals={"torch, group by group": truth},
            num_bytes=inputs.nbytes + (num_rows + ids.unique().numel() * size) * num_outputs * inputs.itemsize,
            num_flop=2 * num_rows * size * num_outputs,
        )
