"""``python -m penstock.ops.lab.bench.lora.make``: writes random adapters of a model, and models with one merged.

transformers runs the merged models as the reference, since an adapter's tokens are those of the merged weights.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from ...peft_folder import LINEAR_LAYERS, merge_adapter, write_adapter
from .folders import RANK, adapter_folder, merged_folder

ALPHA = 2 * RANK
# Size of an adapter's contribution relative to the layer's output: large enough to change tokens.
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
        adapter = adapter_folder(arguments.out, number)
        write_adapter(adapter, _matrices(model, seed=number), RANK, ALPHA)
        if number < arguments.merged:
            merge_adapter(model, adapter)
            folder = merged_folder(arguments.out, number)
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(arguments.model).save_pretrained(folder)
    return 0


def _matrices(model: nn.Module, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A ``[rank, in]`` and B ``[out, rank]`` by the layer's name."""
    random = torch.Generator().manual_seed(seed)
    matrices: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in LINEAR_LAYERS:
            a = torch.randn(RANK, module.in_features, generator=random)
            b = torch.randn(module.out_features, RANK, generator=random)
            added = ALPHA / RANK * (b @ a)
            matrices[name] = a, b * (SIZE * float(module.weight.detach().norm() / added.norm()))
    return matrices


if __name__ == "__main__":
    sys.exit(main())
