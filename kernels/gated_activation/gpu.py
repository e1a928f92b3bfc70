"""Triton kernel for the GPU: one pass over gate and up, computed in float32."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_BLOCK = 1024


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See ``gated_activation.silu_and_mul``."""
    return _launch(gate_up, "silu")


def gelu_and_mul(gate_up: Tensor, approximate: str) -> Tensor:
    """See ``gated_activation.gelu_and_mul``."""
    return _launch(gate_up, "gelu_tanh" if approximate == "tanh" else "gelu")


def _launch(gate_up: Tensor, activation: str) -> Tensor:
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    block = min(_MAX_BLOCK, triton.next_power_of_2(size))
    constants: dict[str, Any] = {"SIZE": size, "BLOCK": block, "ACTIVATION": activation, "num_warps": 4}
    # Rows are on the first axis of the grid, because the second is limited to 65,535.
    _gate_kernel[(num_rows, triton.cdiv(size, block))](
        gate_up, out, gate_up.stride(0) if num_rows > 1 else 2 * size, **constants
    )
    return out


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """Apply "silu", "gelu_tanh" or "gelu" to float32 numbers."""
    if ACTIVATION == "silu":
        result = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y)), and loses no digits where tanh is near -1.
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-2.0 * inner))
    else:
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    return result


@triton.jit
def _gate_kernel(
    gate_up,
    out,
    stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    dtype = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(gate_up + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    # Rounded before the product, as a model's module rounds the result of its activation.
    tl.store(
        out + row * SIZE + columns, (activated(gate, ACTIVATION).to(dtype).to(tl.float32) * up).to(dtype), mask=mask
    )
