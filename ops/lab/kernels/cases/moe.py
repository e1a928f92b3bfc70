"""Experts of Qwen3-30B-A3B and of Mixtral-8x7B."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .....kernels.moe import experts, reference, route
from . import Case, Setting

# Number of experts, experts per token, hidden size, inner size.
_QWEN3 = (128, 8, 2048, 768)
_MIXTRAL = (8, 2, 4096, 14336)
_SMALL = (8, 2, 128, 64)


def cases(setting: Setting) -> Iterator[Case]:
    """Yield cases from one request's decode to a prefill."""
    for num_tokens, sizes in setting.choose(
        on_gpu=[(1, _QWEN3), (64, _QWEN3), (8192, _QWEN3), (64, _MIXTRAL), (2048, _MIXTRAL)], on_cpu=[(16, _SMALL)]
    ):
        num_experts, num_chosen, size, inner = sizes
        logits = setting.random(num_tokens, num_experts)
        yield _route_case(logits, num_chosen)
        gate_up = setting.random(num_experts, 2 * inner, size).mul_(size**-0.5)
        down = setting.random(num_experts, size, inner).mul_(inner**-0.5)
        weights, ids = reference.route(logits, num_chosen, "softmax", True, None, 1.0)

        # The weights are too large to be copied for each comparison.
        def run(hidden: Tensor, weights=weights, ids=ids, gate_up=gate_up, down=down) -> Tensor:
            return experts(hidden, gate_up, down, weights, ids)

        def truth(hidden: Tensor, weights=weights, ids=ids, gate_up=gate_up, down=down) -> Tensor:
            return reference.experts(hidden, gate_up.to(hidden.dtype), down.to(hidden.dtype), weights, ids)

        hidden = setting.random(num_tokens, size)
        num_touched = ids.unique().numel()
        yield Case(
            shape=f"experts T={num_tokens} X={num_experts} J={num_chosen} E={size} I={inner}",
            dtype=hidden.dtype,
            inputs=(hidden,),
            run=run,
            truth=truth,
            rivals={"torch, expert by expert": truth},
            num_bytes=2 * hidden.nbytes + num_touched * 3 * inner * size * hidden.itemsize,
            num_flop=6 * num_tokens * num_chosen * inner * size,
        )


def _route_case(logits: Tensor, num_chosen: int) -> Case:
    def torch_topk(logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(num_chosen, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), ids

    # bfloat16 logits are sometimes equal, and topk picks any of them, so the weights are compared and not the ids.
    return Case(
        shape=f"route T={len(logits)} X={logits.shape[1]} J={num_chosen}",
        dtype=logits.dtype,
        inputs=(logits,),
        run=lambda logits: route(logits, num_chosen)[0],
        truth=lambda logits: reference.route(logits, num_chosen, "softmax", True, None, 1.0)[0],
        rivals={"torch.topk": lambda logits: torch_topk(logits)[0]},
        num_bytes=logits.nbytes,
    )
