"""A mixture of experts: which experts a token goes to, and what they make of it.

Letters: ``T`` tokens, ``X`` experts, ``J`` experts a token goes to, ``E`` hidden size, ``I`` an expert's inner size.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..dispatch import REFERENCE, OnGpu, select
from ..errors import KernelInputError
from . import reference

Scoring = Literal["softmax", "sigmoid"]

_GPU = f"{__package__}.gpu"
_ROUTE = {REFERENCE: reference.route, "cuda": OnGpu(_GPU, "route")}
_EXPERTS = {REFERENCE: reference.experts, "cuda": OnGpu(_GPU, "experts")}


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is more than the reference, which is for comparing."""
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
    """Choose the experts of each token, and how much each counts.

    Scores are the softmax of a row, or the sigmoid of each logit, in float32; the ``num_chosen`` largest are taken, of
    equal ones the first.

    Args:
        logits: ``[T, X]`` of the router, any float dtype, last axis contiguous; ``X`` up to 1024.
        num_chosen: ``J``, at most ``X``.
        renormalizes: whether the chosen scores are divided by their sum (with sigmoid by that and 1e-20).
        bias: ``[X]`` float32, added to the scores when the experts are chosen and not to what they count, or None.
        scale: multiplies what they count.

    Returns:
        Weights ``[T, J]`` float32 in descending order of what they were chosen by, and ids ``[T, J]`` int32. A token's
        do not depend on the other tokens.

    Raises:
        KernelInputError: a shape, dtype or stride above does not hold.

    Cost: memory bound, ``T * X * itemsize`` bytes. Choosing among groups of experts first (DeepSeek-V3) is not done.
    Source: Fedus et al. 2021 (arXiv:2101.03961); sigmoid and bias: DeepSeek-AI 2024 (arXiv:2412.19437), section 2.1.2.
    """
    if logits.ndim != 2 or not logits.is_floating_point() or logits.shape[1] > 1024 or logits.stride(1) != 1:
        found = f"{tuple(logits.shape)} {logits.dtype} with strides {logits.stride()}"
        raise KernelInputError(f"logits must be [T, X <= 1024] of a float dtype, rows contiguous, got {found}")
    if not 1 <= num_chosen <= logits.shape[1]:
        raise KernelInputError(f"num_chosen must be between 1 and {logits.shape[1]}, got {num_chosen}")
    if bias is not None and (bias.shape != logits.shape[1:] or bias.dtype != torch.float32):
        raise KernelInputError(f"bias must be [{logits.shape[1]}] float32, got {tuple(bias.shape)} {bias.dtype}")
    return select(_ROUTE, logits.device, logits.dtype)(logits, num_chosen, scoring, renormalizes, bias, scale)


def experts(hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Return for each token the weighted sum of what its experts, gated by SiLU, make of it.

    Args:
        hidden: ``[T, E]``, last axis contiguous.
        gate_up: ``[X, 2 * I, E]``, of each expert first the gate; contiguous, dtype of ``hidden``.
        down: ``[X, E, I]``, contiguous, dtype of ``hidden``.
        weights: ``[T, J]`` of a float dtype.
        ids: ``[T, J]`` int32 or int64, below ``X``, of a token all different.

    Returns:
        ``[T, E]``, dtype of ``hidden``. On a GPU products and gate are in float32, and what an expert makes is rounded
        twice, before and behind its last product; a token has the same bits whatever the other tokens are, as long as
        ``T * J / X`` leads to the same block size (``grouped_linear``).

    Raises:
        KernelInputError: a shape, dtype or stride above does not hold.

    Cost: ``6 * T * J * I * E`` FLOP; with few tokens memory bound, ``3 * I * E * itemsize`` bytes for each expert that
    occurs. How many tokens an expert has is never read back to the host.
    Source: Shazeer et al. 2017 (arXiv:1701.06538); Gale et al. 2022 (arXiv:2211.15841).
    """
    num_tokens, size = hidden.shape if hidden.ndim == 2 else (-1, -1)
    inner = down.shape[-1]
    if gate_up.shape != (len(down), 2 * inner, size) or down.shape[1:] != (size, inner):
        found = f"{tuple(hidden.shape)}, {tuple(gate_up.shape)} and {tuple(down.shape)}"
        raise KernelInputError(f"hidden, gate_up and down must be [T, E], [X, 2 * I, E] and [X, E, I], got {found}")
    if not hidden.dtype == gate_up.dtype == down.dtype:
        raise KernelInputError(f"gate_up and down must be {hidden.dtype}, got {gate_up.dtype} and {down.dtype}")
    if hidden.stride(1) != 1 or not gate_up.is_contiguous() or not down.is_contiguous():
        raise KernelInputError("gate_up and down must be contiguous, and rows of hidden")
    if weights.shape != ids.shape or weights.ndim != 2 or len(weights) != num_tokens:
        found = f"{tuple(weights.shape)} and {tuple(ids.shape)}"
        raise KernelInputError(f"weights and ids must both be [{num_tokens}, J], got {found}")
    if not weights.is_floating_point() or ids.dtype not in (torch.int32, torch.int64):
        found = f"{weights.dtype} and {ids.dtype}"
        raise KernelInputError(f"weights and ids must be of floats and of int32 or int64, got {found}")
    return select(_EXPERTS, hidden.device, hidden.dtype)(hidden, gate_up, down, weights, ids)
