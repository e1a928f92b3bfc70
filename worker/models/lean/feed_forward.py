"""What a layer does to each token by itself: dense, or a mixture of experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....kernels import moe
from ....kernels.gated_activation import silu_and_mul
from ....shared.errors import ModelLoadError
from ..parallel.summed import Summed
from .fuse import fuse_linear


class GatedMlp(nn.Module):
    """A dense feed-forward layer with gate and up projection in one."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.gate_up_proj = fuse_linear([own.gate_proj, own.up_proj])
        self.down_proj = own.down_proj

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))


class OwnMlp(nn.Module):
    """The model's own feed-forward part: a mixture of experts, whose experts transformers holds fused."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.own(hidden[None])
        return (out[0] if isinstance(out, tuple) else out)[0]


class SparseMlp(nn.Module):
    """A mixture of experts by our own kernels, on the weights of the model's."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.router_weight = own.gate.weight
        self.gate_up_proj = own.experts.gate_up_proj
        self.down_proj = own.experts.down_proj
        self.num_chosen = own.gate.top_k
        # Mixtral always renormalises, and is the one that keeps what its experts count in float32.
        self.renormalizes = getattr(own.gate, "norm_topk_prob", True)
        self.weights_dtype = own.gate.weight.dtype if hasattr(own.gate, "norm_topk_prob") else torch.float32

    def forward(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.router_weight)
        weights, ids = moe.route(logits, self.num_chosen, renormalizes=self.renormalizes)
        return moe.experts(hidden, self.gate_up_proj, self.down_proj, weights.to(self.weights_dtype), ids)


class SharedExpertMlp(nn.Module):
    """A mixture of experts beside one expert that all tokens go to, by a gate (Qwen2)."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.routed = SparseMlp(own)
        self.shared = GatedMlp(own.shared_expert)
        self.gate = own.shared_expert_gate

    def forward(self, hidden: Tensor) -> Tensor:
        return self.routed(hidden) + torch.sigmoid(self.gate(hidden)) * self.shared(hidden)


def make_feed_forward(layer: Any) -> nn.Module:
    """The feed-forward part of a decoder layer of transformers, on its weights.

    Raises:
        ModelLoadError: the layer is not like Llama's.
    """
    own = getattr(layer, "mlp", None)
    if own is None:
        raise ModelLoadError(f"{type(layer).__name__} has no feed-forward part of a known name")
    if isinstance(own, Summed):
        return Summed(_of_block(own.inner), own.groups)
    return _of_block(own)


def _of_block(own: Any) -> nn.Module:
    if all(isinstance(getattr(own, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj")):
        if not _is_silu(own.act_fn):
            raise ModelLoadError(f"its activation is {type(own.act_fn).__name__}, not SiLU")
        return GatedMlp(own)
    weight = getattr(getattr(own, "experts", None), "gate_up_proj", None)
    # Where kernels have nothing but their reference, the model's own block is as good and better tried.
    if weight is None or not moe.is_made_for(weight.device, weight.dtype) or not _is_silu(own.experts.act_fn):
        return OwnMlp(own)
    return SharedExpertMlp(own) if hasattr(own, "shared_expert") else SparseMlp(own)


def _is_silu(activation: nn.Module) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
