"""``python -m penstock.ops.bench.lora.make``: random adapters of a model, and for some of them a model with it merged.

The merged ones are what transformers is asked about: an adapter's tokens are those of the weights that it makes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from .folders import RANK, adapter_folder, merged_folder

ALPHA = 2 * RANK
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# How large what an adapter adds is beside what the layer makes: enough that its tokens are others.
SIZE = 0.3


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--number", type=int, required=True, help="of adapters")
    parser.add_argument("--merged", type=int, required=True, help="so many of them are merged, too")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    for number in range(arguments.number):
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
        matrices = _matrices(model, seed=number)
        _write(adapter_folder(arguments.out, number), matrices)
        if number < arguments.merged:
            _merge(model, matrices)
            folder = merged_folder(arguments.out, number)
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(arguments.model).save_pretrained(folder)
    return 0


def _matrices(model: nn.Module, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """A ``[rank, in]`` and B ``[out, rank]`` by the layer's name."""
    random = torch.Generator().manual_seed(seed)
    made: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in TARGETS:
            a = torch.randn(RANK, module.in_features, generator=random)
            b = torch.randn(module.out_features, RANK, generator=random)
            added = ALPHA / RANK * (b @ a)
            made[name] = a, b * (SIZE * float(module.weight.detach().norm() / added.norm()))
    return made


def _write(folder: Path, matrices: dict[str, tuple[Tensor, Tensor]]) -> None:
    """As PEFT saves it."""
    folder.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    for layer, (a, b) in matrices.items():
        tensors[f"base_model.model.{layer}.lora_A.weight"] = a.contiguous()
        tensors[f"base_model.model.{layer}.lora_B.weight"] = b.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": list(TARGETS)}))


@torch.no_grad()
def _merge(model: nn.Module, matrices: dict[str, tuple[Tensor, Tensor]]) -> None:
    modules = dict(model.named_modules())
    for layer, (a, b) in matrices.items():
        modules[layer].get_parameter("weight").add_(ALPHA / RANK * (b.double() @ a.double()).float())


if __name__ == "__main__":
    sys.exit(main())
