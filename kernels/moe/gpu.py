"""Triton kernels for the GPU: routing, two grouped products (the first with the gate), and a weighted sum per token."""

# Pyright checks the functions that Triton compiles as if Python ran them.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..grouped_linear.gpu import multiply, rows_per_block
from ..grouped_linear.gpu_groups import group_rows

_SUM_BLOCK = 1024


def route(
    logits: Tensor, num_chosen: int, scoring: str, renormalizes: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``moe.route``."""
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, num_chosen, dtype=torch.int32, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits, logits.stride(0), logits if bias is None else bias.contiguous(), weights, ids, num_experts, scale,
            NUM_CHOSEN=num_chosen, CHOSEN=triton.next_power_of_2(num_chosen),
            EXPERTS=triton.next_power_of_2(num_experts), IS_SIGMOID=scoring == "sigmoid", HAS_BIAS=bias is not None,
            RENORMALIZES=renormalizes, num_warps=1 if num_experts <= 256 else 4,
        )  # fmt: skip
    return weights, ids


def experts(hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """See ``moe.experts``."""
    num_tokens, num_chosen = ids.shape
    num_experts, size, inner_size = down.shape
    groups = group_rows(ids, num_experts, rows_per_block(ids.numel(), num_experts))
    inner = hidden.new_empty(num_tokens * num_chosen, inner_size)
    multiply(hidden, gate_up, groups, inner, entries_per_row=num_chosen, is_gated=True)
    outputs = hidden.new_empty(num_tokens * num_chosen, size)
    multiply(inner, down, groups, outputs, entries_per_row=1)
    out = hidden.new_empty(num_tokens, size)
    if num_tokens:
        _sum_kernel[(num_tokens, triton.cdiv(size, _SUM_BLOCK))](
            outputs, weights.contiguous(), out, size, NUM_CHOSEN=num_chosen, BLOCK=_SUM_BLOCK, num_warps=4
        )
    return out


@triton.jit
def _route_kernel(
    logits, stride, bias, weights, ids, num_experts, scale,
    NUM_CHOSEN: tl.constexpr, CHOSEN: tl.constexpr, EXPERTS: tl.constexpr,
    IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZES: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token: take the best, exclude it, and repeat."""
    token = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    row = tl.load(logits + token.to(tl.int64) * stride + expert, mask=is_expert, other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-row))
    else:
        powers = tl.exp(row - tl.max(row, 0))
        scores = powers / tl.sum(powers, 0)
    choice = scores
    if HAS_BIAS:
        choice = scores + tl.load(bias + expert, mask=is_expert, other=0.0)
    choice = tl.where(is_expert, choice, float("-inf"))
    rank = tl.arange(0, CHOSEN)
    chosen_scores = tl.zeros((CHOSEN,), tl.float32)
    chosen_ids = tl.zeros((CHOSEN,), tl.int32)
    is_available = is_expert
    for turn in range(NUM_CHOSEN):
        best = tl.max(tl.where(is_available, choice, float("-inf")), 0)
        best_id = tl.min(tl.where(is_available & (choice == best), expert, EXPERTS), 0)
        # A row of NaN has no best score. It gets the first available expert, because an id must be valid.
        best_id = tl.where(best_id == EXPERTS, tl.min(tl.where(is_available, expert, EXPERTS), 0), best_id)
        score = tl.sum(tl.where(expert == best_id, scores, 0.0), 0)
        chosen_scores = tl.where(rank == turn, score, chosen_scores)
        chosen_ids = tl.where(rank == turn, best_id, chosen_ids)
        is_available = is_available & (expert != best_id)
    if RENORMALIZES:
        total = tl.sum(chosen_scores, 0)
        if IS_SIGMOID:
            total += 1e-20
        chosen_scores = chosen_scores / total
    target = token.to(tl.int64) * NUM_CHOSEN + rank
    tl.store(weights + target, chosen_scores * scale, mask=rank < NUM_CHOSEN)
    tl.store(ids + target, chosen_ids, mask=rank < NUM_CHOSEN)


@triton.jit
def _sum_kernel(outputs, weights, out, size, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a part of one token's weighted sum, in float32 and in the order in which experts were chosen."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for chosen in range(NUM_CHOSEN):
        entry = token * NUM_CHOSEN + chosen
        weight = tl.load(weights + entry).to(tl.float32)
        total += weight * tl.load(outputs + entry * size + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=column < size)
