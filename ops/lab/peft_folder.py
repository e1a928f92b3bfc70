"""Adapters as PEFT saves them, written and merged by its documented arithmetic; its package is not needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...shared.params.lora import CONFIG_FILE, WEIGHTS_FILE

# Every linear layer of attention and MLP, as Llama and its kin call them.
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


def write_adapter(folder: Path, matrices: Mapping[str, tuple[Tensor, Tensor]], rank: int, alpha: int) -> None:
    """Write an adapter of ``LINEAR_LAYERS``.

    Args:
        matrices: by the name of each layer ``[rank, in]`` and ``[out, rank]``, in the dtype that the file is to have.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in matrices.items():
        tensors[f"{_PREFIX}{name}{_A}"] = a.contiguous()
        tensors[f"{_PREFIX}{name}{_B}"] = b.contiguous()
    save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt"})
    config: dict[str, Any] = {
        "base_model_name_or_path": "demo",
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(LINEAR_LAYERS),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def merge_adapter(model: nn.Module, folder: Path) -> None:
    """Add the adapter in ``folder`` to the weights of ``model``."""
    config = json.loads((folder / CONFIG_FILE).read_text())
    tensors, scale = load_file(folder / WEIGHTS_FILE), config["lora_alpha"] / config["r"]
    for name in [name.removesuffix(_A) for name in tensors if name.endswith(_A)]:
        low_rank = tensors[f"{name}{_B}"].double() @ tensors[f"{name}{_A}"].double()
        model.get_parameter(f"{name.removeprefix(_PREFIX)}.weight").add_((scale * low_rank).float())
