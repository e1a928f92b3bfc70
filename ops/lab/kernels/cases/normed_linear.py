"""Entries of the layers of Qwen3 0.6B and 8B: norm and queries, keys, values; norm, gate and up."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from .....kernels.normed_linear import normed_linear, reference
from . import Case, Setting

_EPS = 1e-6


def cases(setting: Setting) -> Iterator[Case]:
    """Yield cases of one row and of the most rows; the rival is what layers do without the kernel."""
    layers = [(1024, 4096, 3072), (4096, 6144, 12288)]
    for size, num_heads_out, num_gated in setting.choose(on_gpu=layers, on_cpu=[(256, 128, 128)]):
        parts = (("heads", num_heads_out, None), ("gate", num_gated, "silu"))
        for num_rows in setting.choose(on_gpu=[1, 4, 16], on_cpu=[4]):
            for name, num_outputs, activation in parts:
                weight = setting.random((1 if activation is None else 2) * num_outputs, size) * size**-0.5
                inputs = setting.random(num_rows, size), setting.random(num_rows, size), setting.random(size), weight
                yield Case(
                    shape=f"{name} T={num_rows} E={size} N={num_outputs}",
                    dtype=weight.dtype,
                    inputs=inputs,
                    run=partial(_run, activation=activation),
                    truth=partial(_run_reference, activation=activation),
                    rivals={"three launches": partial(_run_reference, activation=activation)},
                    num_bytes=sum(tensor.nbytes for tensor in inputs) + inputs[0].nbytes,
                    num_flop=2 * num_rows * weight.numel(),
                )


def _run(
    hidden: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor, activation: str | None
) -> tuple[Tensor, Tensor]:
    return normed_linear(hidden, residual, norm_weight, _EPS, weight, activation=activation)


def _run_reference(
    hidden: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor, activation: str | None
) -> tuple[Tensor, Tensor]:
    return reference.normed_linear(hidden, residual, norm_weight, _EPS, weight, None, activation)
