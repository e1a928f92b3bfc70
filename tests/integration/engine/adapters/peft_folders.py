"""Adapters of random weights, saved as PEFT saves them, and models with them merged.

The merging knows nothing of the engine's reader: it is PEFT's documented arithmetic, by hand.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.shared.params.lora import LoRARequest, adapter_digest

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Kind:
    """The properties of an adapter; ``config`` are fields of its configuration beside the usual ones."""

    rank: int = 8
    alpha: float = 16
    targets: tuple[str, ...] | str = ALL
    is_rank_stabilized: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def matches(self, layer: str) -> bool:
        if self.targets == "all-linear":
            return not layer.endswith("lm_head")
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, layer) is not None
        return layer.rsplit(".", 1)[-1] in self.targets

    def rank_and_scale(self, layer: str) -> tuple[int, float]:
        rank = next((r for key, r in self.rank_pattern.items() if re.search(rf"(^|\.){key}$", layer)), self.rank)
        alpha = next((a for key, a in self.alpha_pattern.items() if re.search(rf"(^|\.){key}$", layer)), self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


R4 = Kind(rank=4, alpha=8, targets=("q_proj", "v_proj"))
R8 = Kind(targets="all-linear")
R16 = Kind(
    rank=16,
    alpha=12,
    targets=r".*\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
    is_rank_stabilized=True,
    rank_pattern={"q_proj": 6, r"layers\.1\.mlp\.down_proj": 3},
    alpha_pattern={"gate_proj": 20, r"layers\.0\.self_attn\.o_proj": 5},
)
MIXED = {"r4": R4, "r8": R8, "r16": R16}


def load_base(folder: Path, **options: Any) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def matrices_of(base: nn.Module, kind: Kind, seed: int, size: float = 0.6) -> dict[str, tuple[Tensor, Tensor]]:
    """Random ones by layer; what they add is ``size`` times as large as what the layer makes."""
    random = torch.Generator().manual_seed(seed)
    made: dict[str, tuple[Tensor, Tensor]] = {}
    for layer, module in base.named_modules():
        if not isinstance(module, nn.Linear) or not kind.matches(layer):
            continue
        rank, scale = kind.rank_and_scale(layer)
        a = torch.randn(rank, module.in_features, generator=random)
        b = torch.randn(module.out_features, rank, generator=random)
        factor = size * float(module.weight.detach().float().norm()) / float((scale * b @ a).norm())
        made[layer] = (a, b * factor)
    assert made
    return made


def write_adapter(folder: Path, base: nn.Module, kind: Kind, seed: int = 0, size: float = 0.6) -> Path:
    """Save an adapter of ``base`` in ``folder``."""
    folder.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    for layer, (a, b) in matrices_of(base, kind, seed, size).items():
        tensors[f"base_model.model.{layer}.lora_A.weight"] = a.contiguous()
        tensors[f"base_model.model.{layer}.lora_B.weight"] = b.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": kind.rank,
        "lora_alpha": kind.alpha,
        "lora_dropout": 0.05,
        "target_modules": kind.targets if isinstance(kind.targets, str) else list(kind.targets),
        "use_rslora": kind.is_rank_stabilized,
        "rank_pattern": kind.rank_pattern,
        "alpha_pattern": kind.alpha_pattern,
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        **kind.config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge(base: nn.Module, kind: Kind, seed: int = 0, size: float = 0.6) -> nn.Module:
    """Add to ``base`` what ``write_adapter`` has saved, and return it."""
    made = matrices_of(base, kind, seed, size)
    modules = dict(base.named_modules())
    with torch.no_grad():
        for layer, (a, b) in made.items():
            weight = modules[layer].get_parameter("weight")
            weight += (kind.rank_and_scale(layer)[1] * (b.double() @ a.double())).to(weight.dtype)
    return base


def lora_request(folder: Path, number: int = 1, **fields: Any) -> LoRARequest:
    """A request's word for the adapter in ``folder``, with its digest."""
    return LoRARequest(folder.name, number, str(folder), **{"digest": adapter_digest(folder), **fields})


@torch.inference_mode()
def greedy(module: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' own tokens."""
    inputs = torch.tensor([prompt])
    made = module.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return made[0, len(prompt) :].tolist()


MakeAdapter = Callable[[str, Kind], Path]
