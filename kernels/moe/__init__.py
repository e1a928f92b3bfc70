"""Mixture of experts: route each token to its experts, and sum their weighted outputs.

Letters: ``T`` tokens, ``X`` experts, ``J`` experts per token, ``E`` hidden size, ``I`` an expert's inner size.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..dispatch import REFERENCE, KernelInputError, OnGpu, select
from . import reference

Scoring = Literal["softmax", "sigmoid"]

_GPU = f"{__package__}.gpu"
_ROUTE = {REFERENCE: reference.route, "cuda": OnGpu(_GPU, "route")}
_EXPERTS = {REFERENCE: reference.experts, "cuda": OnGpu(_GPU, "experts")}


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a kernel other than the reference supports ``dtype`` on ``device``."""
    return select(_EXPERTS, device, dtype) is not reference.experts


def route(
    logits: Tensor,
    num_chosen: int,
    *,
    scoring: Scoring = "softmax",
    renormalizes: bool = True,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token, and their weights.

    Scores are the softmax of a row, or the sigmoid of each logit, in float32. The experts with the ``num_chosen``
    largest scores are chosen; the first of equal ones wins.

    Args:
        logits: ``[T, X]`` of the router, any float dtype, last axis contiguous; ``X`` up to 1024.
        num_chosen: ``J``, at most ``X``.
        renormalizes: divide the chosen scores by their sum (for sigmoid by the sum plus 1e-20).
        bias: ``[X]`` float32, added to the scores to choose experts, but not to the weights; None without.
        scale: factor on the weights.

    Returns:
        Weights ``[T, J]`` float32 and ids ``[T, J]`` int32, in descending order of the score that chose the expert. A
        token's result does not depend on the other tokens.

    Raises:
        KernelInputError: a shape, dtype or stride above does not hold.

    Cost: memory bound, ``T * X * itemsize`` bytes. Group-limited routing (DeepSeek-V3) is not supported.
    Source: Fedus et al. 2021 (arXiv:2101.03961); sigmoid and bias: DeepSeek-AI 2024 (arXiv:2412.19437), section 2.1.2.
    """
    if logits.ndim != 2 or not logits.is_floating_point() or logits.shape[1] > 1024 or logits.stride(1) != 1:
        actual = f"{tuple(logits.shape)} {logits.dtype} with strides {logits.stride()}"
        raise KernelInputError(f"logits must be [T, X <= 1024] of a float dtype, rows contiguous, got {actual}")
    if not 1 <= num_chosen <= logits.shape[1]:
        raise KernelInputError(f"num_chosen must be between 1 and {logits.shape[1]}, got {num_chosen}")
    if bias is not None and (bias.shape != logits.shape[1:] or bias.dtype != torch.float32):
        raise KernelInputError(f"bias must be [{logits.shape[1]}] float32, got {tuple(bias.shape)} {bias.dtype}")
    return select(_ROUTE, logits.device, logits.dtype)(logits, num_chosen, scoring, renormalizes, bias, scale)


def experts(hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Return for each token the weighted sum of the outputs of its experts, which are gated by SiLU.

    Args:
        hidden: ``[T, E]``, last axis contiguous.
        gate_up: ``[X, 2 * I, E]``, the gate of each expert first; contiguous, dtype of ``hidden``.
        down: ``[X, E, I]``, contiguous, dtype of ``hidden``.
        weights: ``[T, J]`` of a float dtype.
        ids: ``[T, J]`` int32 or int64, below ``X``, all different for a token.

    Returns:
        ``[T, E]``, dtype of ``hidden``. On a GPU products and gate are in float32, and an expert's output is rounded
        twice, before and after its last product. The bits of a token do not depend on the other tokens, as long as
        ``T * J / X`` leads to the same block size (``grouped_linear``).

    Raises:
        KernelInputError: a shape, dtype or stride above does not hold.

    Cost: ``6 * T * J * I * E`` FLOP; for few tokens memory bound, ``3 * I * E * itemsize`` bytes for each expert that
    occurs. The number of tokens of an expert is never read back to the host.
    Source: Shazeer et al. 2017 (arXiv:1701.06538); Gale et al. 2022 (arXiv:2211.15841).
    """
    num_tokens, size = hidden.shape if hidden.ndim == 2 else (-1, -1)
    inner = down.shape[-1]
    if gate_up.shape != (len(down), 2 * inner, size) or down.shape[1:] != (size, inner):
        actual = f"{tuple(hidden.shape)}, {tuple(gate_up.shape)} and {tuple(down.shape)}"
        raise KernelInputError(f"hidden, gate_up and down must be [T, E], [X, 2 * I, E] and [X, E, I], got {actual}")
    if not hidden.dtype == gate_up.dtype == down.dtype:
        raise KernelInputError(f"gate_up and down must be {hidden.dtype}, got {gate_up.dtype} and {down.dtype}")
    if hidden.stride(1) != 1 or not gate_up.is_contiguous() or not down.is_contiguous():
        raise KernelInputError("gate_up, down and the rows of hidden must be contiguous")
    if weights.shape != ids.shape or weights.ndim != 2 or len(weights) != num_tokens:
        actual = f"{tuple(weights.shape)} and {tuple(ids.shape)}"
        raise KernelInputError(f"weights and ids must both be [{num_tokens}, J], got {actual}")
    if not weights.is_floating_point() or ids.dtype not in (torch.int32, torch.int64):
        actual = f"{weights.dtype} and {ids.dtype}"
        raise KernelInputError(f"weights and ids must be floats, and int32 or int64, got {actual}")
    return select(_EXPERTS, hidden.device, hidden.dtype)(hidden, gate_up, down, weights, ids)
