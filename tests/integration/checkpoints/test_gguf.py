"""A GGUF file is the model that it stands for: every type of block, every architecture, config and tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file

from .conftest import SHAPE, save_model, write_folder
from .gguf_models import drawn_model, write_model
from .gguf_writer import KINDS
from .test_formats import assert_same, load

# Rows of 256, so that all types are there.
WIDE = {**SHAPE, "hidden_size": 256, "intermediate_size": 256}
EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 1}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**WIDE),
    "qwen2": lambda: transformers.Qwen2Config(**{**SHAPE, "tie_word_embeddings": True}),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=32),
    "qwen3moe": lambda: transformers.Qwen3MoeConfig(
        **{**SHAPE, **EXPERTS}, head_dim=16, num_experts=4, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "mixtral": lambda: transformers.MixtralConfig(**{**SHAPE, **EXPERTS}, num_local_experts=4),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("key", CONFIGS)
def test_a_file_is_what_it_stands_for(key: str, tmp_path: Path) -> None:
    config = CONFIGS[key]()
    source = save_model(config, tmp_path / "source")
    kinds = KINDS if key == "llama" else ("Q8_0", "Q4_0", "F16")
    drawn = drawn_model(load_file(source / "model.safetensors"), config, kinds)
    path = write_model(tmp_path / "model.gguf", config, "llama" if key == "mixtral" else key, drawn)
    plain = write_folder(tmp_path / "plain", source, drawn[2])
    found, wanted = load(path), load(plain)
    assert_same(found, wanted)
    said = found.config.to_dict()
    differing = {name for name, value in wanted.config.to_diff_dict().items() if said.get(name) != value}
    assert differing <= {"initializer_range", "head_dim"}
    if key == "llama":
        assert {blocks.kind for blocks in drawn[0].values()} == set(KINDS)
