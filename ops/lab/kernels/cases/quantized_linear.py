"""Projections of an 8B model in int8 and float8."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .....kernels.quantized_linear import quantize_rows, quantize_weight, quantized_linear, reference
from . import Case, Setting


def cases(setting: Setting) -> Iterator[Case]:
    for num_tokens, num_inputs, num_outputs in setting.choose(
        on_gpu=[(1, 4096, 12288), (64, 4096, 12288), (8192, 4096, 12288)], on_cpu=[(16, 256, 256)]
    ):
        inputs = setting.random(num_tokens, num_inputs)
        plain = setting.random(num_outputs, num_inputs).mul_(num_inputs**-0.5)
        for kind, name in ((torch.int8, "int8"), (torch.float8_e4m3fn, "float8")):
            weight = quantize_weight(plain, kind)
            values, scales = weight.values, weight.scales

            def run(inputs: Tensor, weight=weight) -> Tensor:
                return quantized_linear(inputs, weight)

            def truth(inputs: Tensor, kind=kind, values=values, scales=scales) -> Tensor:
                return reference.multiply(*reference.quantize_rows(inputs, kind), values, scales, None, torch.float64)

            yield Case(
                shape=f"{name} T={num_tokens} K={num_inputs} N={num_outputs}",
                dtype=inputs.dtype,
                inputs=(inputs,),
                run=run,
                truth=truth,
                num_bytes=2 * inputs.nbytes + values.nbytes + num_tokens * num_outputs * inputs.itemsize,
                num_flop=2 * num_tokens * num_inputs * num_outputs,
            )
        yield Case(
            shape=f"rows to int8 T={num_tokens} K={num_inputs}",
            dtype=inputs.dtype,
            inputs=(inputs,),
            run=lambda inputs: quantize_rows(inputs, torch.int8)[1],
            truth=lambda inputs: reference.quantize_rows(inputs, torch.int8)[1],
            num_bytes=2 * inputs.nbytes + inputs.numel(),
        )
