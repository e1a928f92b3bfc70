"""The entries of a layer's parts in one kernel, for few rows: the sum with the stream, its norm, and the product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .....kernels.normed_linear import DTYPES, GATES, normed_linear
from .feed_forward import GatedMlp
from .layer import AnyLayer, Enter, Feed, FeedingLayer
from .norms import AnyNorm, Norm

# ``normed_linear``, or another function with its arguments.
Product = Callable[..., tuple[Tensor, Tensor]]


def make_enter(layer: AnyLayer, max_rows: int, product: Product = normed_linear) -> Enter | None:
    """Return ``layer.enter`` by ``product`` for up to ``max_rows`` rows; None if the layer has another form."""
    has_input = layer.plan.attention is not None and not layer.plan.is_parallel
    if not has_input or not _suits(layer.input_norm, layer.in_proj):
        return None
    return partial(_enter, layer, max_rows, product)


def make_feed(layer: AnyLayer, max_rows: int, product: Product = normed_linear) -> Feed | None:
    """Return ``layer.feed`` by ``product`` for up to ``max_rows`` rows; None if the layer has another form."""
    mlp = layer.mlp
    if layer.plan.is_parallel or isinstance(layer, FeedingLayer) or not isinstance(mlp, GatedMlp):
        return None
    is_gated = mlp.is_gated and mlp.activation in GATES
    return (
        partial(_feed, layer, mlp, max_rows, product) if is_gated and _suits(layer.mlp_norm, mlp.gate_up_proj) else None
    )


def _suits(norm: AnyNorm, linear: Any) -> bool:
    """Return whether the kernel computes them. Adapters are hooks of the linear layer, which it does not call."""
    if not isinstance(norm, Norm) or type(linear) is not nn.Linear or linear._forward_hooks:
        return False
    weight = linear.weight
    return weight.dtype in DTYPES and weight.is_contiguous() and norm.weight.dtype in (weight.dtype, torch.float32)


def _enter(
    layer: AnyLayer, max_rows: int, product: Product, hidden: Tensor, residual: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    if len(hidden) > max_rows:
        return layer.add_and_project(hidden, residual)
    norm, linear = layer.input_norm, layer.in_proj
    assert isinstance(norm, Norm)
    rows, residual = product(hidden, residual, norm.weight, norm.eps, linear.weight, linear.bias)
    return rows, (residual,)


def _feed(
    layer: AnyLayer, mlp: GatedMlp, max_rows: int, product: Product, added: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    if len(added) > max_rows:
        return layer.add_and_feed(added, residual)
    norm, linear = layer.mlp_norm, mlp.gate_up_proj
    assert isinstance(norm, Norm)
    gated, residual = product(
        added, residual, norm.weight, norm.eps, linear.weight, linear.bias, activation=mlp.activation
    )
    return mlp.down_proj(gated), residual
