"""A small model that checkpoints of all formats are made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...native_library import compiled
from .packing import Format

__all__ = ["compiled"]

VOCAB_SIZE = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# As lists of what is not to be converted have it: one layer of another kind than its neighbours.
LEFT_OUT = "model.layers.1.mlp.down_proj.weight"
MakePair = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Keep torch off the other cores: the models are tiny."""
    torch.set_num_threads(1)


def save_model(config: transformers.PretrainedConfig, folder: Path) -> Path:
    """A random model with a tokenizer of numbered words, in ``folder``."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    vocabulary = {f"<{i}>": i for i in range(VOCAB_SIZE)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<0>"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def write_folder(folder: Path, source: Path, tensors: dict[str, Tensor], **fields: Any) -> Path:
    """The model of ``source`` with other weights, and other fields in its configuration."""
    folder.mkdir()
    for name in ("tokenizer.json", "generation_config.json"):
        (folder / name).write_text((source / name).read_text())
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(transformers.LlamaConfig(**SHAPE), tmp_path_factory.mktemp("base"))


@pytest.fixture
def make_pair(base: Path, tmp_path: Path) -> MakePair:
    """Write the model in a format, and beside it what it stands for: their folders."""

    def make(packing: Format, source: Path = base) -> tuple[Path, Path]:
        rng = np.random.default_rng(0)
        held, plain = load_file(source / "model.safetensors"), load_file(source / "model.safetensors")
        for name, weight in plain.items():
            if "_proj." not in name or name == LEFT_OUT:
                continue
            layer = name.removesuffix("weight")
            made = packing.pack(rng, (weight.shape[0], weight.shape[1]))
            del held[name]
            held |= {layer + end: tensor for end, tensor in made.tensors.items()}
            held |= {layer + end: torch.ones(1) for end in packing.beside}
            plain[name] = made.weight
        packed = write_folder(tmp_path / "packed", source, held, quantization_config=packing.settings)
        return packed, write_folder(tmp_path / "plain", source, plain)

    return make
