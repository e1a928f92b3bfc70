from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ..supervisor.conftest import start_worker

__all__ = ["start_worker"]

VOCAB_SIZE = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random mixture of six experts."""
    folder = tmp_path_factory.mktemp("moe") / "model"
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SHAPE)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    vocabulary = {f"<{i}>": i for i in range(VOCAB_SIZE)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<0>"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
