"""A GGUF file is the model that it stands for: every type of block, every architecture, config and tokenizer."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.shared.errors import ModelLoadError
from penstock.worker.models.checkpoint.folder import resolve_model_folder
from penstock.worker.models.gguf.container import open_gguf
from penstock.worker.models.gguf.folder import gguf_folder
from penstock.worker.models.gguf.tensors import read_gguf

from .conftest import SHAPE, save_model, write_folder
from .gguf_models import drawn_model, write_model
from .gguf_writer import KINDS, draw, write_gguf
from .gguf_writer import plain as plain_blocks
from .loading import assert_same, load, tokens

# The end of its name, its shape, its type: Q8_0.
TYPE_OF_EMBEDDING = b"token_embd.weight" + struct.pack("<IQQI", 2, 64, 128, 8)
# Rows of 256, so that all types are there.
WIDE = {**SHAPE, "hidden_size": 256, "intermediate_size": 256}
EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 1}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**WIDE),
    "qwen2": lambda: transformers.Qwen2Config(**{**SHAPE, "tie_word_embeddings": True}),
    "qwen3": lambda: transformers.Qwen3Config(**{**SHAPE, "head_dim": 32}),
    "qwen3moe": lambda: transformers.Qwen3MoeConfig(
        **{**SHAPE, **EXPERTS, "head_dim": 16}, num_experts=4, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "mixtral": lambda: transformers.MixtralConfig(**{**SHAPE, **EXPERTS}, num_local_experts=4),
}


@pytest.mark.parametrize("key", CONFIGS)
def test_a_gguf_file_loads_as_its_dequantized_weights(key: str, tmp_path: Path) -> None:
    config = CONFIGS[key]()
    source = save_model(config, tmp_path / "source")
    kinds = KINDS if key == "llama" else ("Q8_0", "Q4_0", "F16")
    drawn = drawn_model(load_file(source / "model.safetensors"), config, kinds)
    path = write_model(tmp_path / "model.gguf", config, "llama" if key == "mixtral" else key, drawn)
    folder = gguf_folder(path, tmp_path / "cache")
    plain = write_folder(tmp_path / "plain", source, drawn[2])
    found, wanted = load(folder), load(plain)
    assert_same(found, wanted)
    said = found.config.to_dict()
    differing = {name for name, value in wanted.config.to_diff_dict().items() if said.get(name) != value}
    assert differing <= {"initializer_range", "head_dim"}
    if key == "llama":
        assert tokens(folder) == tokens(plain)
        assert {blocks.kind for blocks in drawn[0].values()} == set(KINDS)


def some_file(tmp_path: Path, *, key: str = "qwen2", kinds: tuple[str, ...] = ("Q8_0",), **more: Any) -> Path:
    config = CONFIGS["qwen2"]()
    rng = np.random.default_rng(0)
    names = {"token_embd.weight": (128, 64), "blk.0.attn_q.weight": (64, 64)}
    tensors = {name: draw(kind, rng, shape) for kind, (name, shape) in zip(kinds * 2, names.items(), strict=False)}
    return write_model(tmp_path / "model.gguf", config, key, (tensors, {}, {}), **more)


def test_a_file_is_described_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = some_file(tmp_path)
    folder = resolve_model_folder(str(path))
    assert folder.is_relative_to(tmp_path / "cache")
    assert resolve_model_folder(str(path)) == folder
    os.utime(path, (1, 1))
    assert resolve_model_folder(str(path)) != folder


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"general__architecture": "gpt9"}, "of the architecture 'gpt9', and of GGUF files llama, mistral3, qwen2"),
        (
            {"tokenizer__ggml__model": "plamo2"},
            "tokenizer of the kind 'plamo2'.*gpt2, llama, gemma4, t5, bert are read",
        ),
        ({"tokenizer__ggml__pre": "klingon"}, "splits text by tokenizer.ggml.pre 'klingon'"),
        ({"tokenizer__ggml__tokens": ["a"]}, "the tokenizer in .* cannot be read"),
        ({"qwen2__attention__head_count": [4, 4]}, r"qwen2\.attention\.head_count \[4, 4\]"),
        ({"qwen2__attention__head_count": 0}, r"qwen2\.attention\.head_count 0, and .* 1 or more"),
        ({"qwen2__rope__scaling__type": "longrope"}, "rope.scaling.type 'longrope'"),
        ({"qwen2__rope__freq_base": "a"}, r"qwen2\.rope\.freq_base 'a', and a number is wanted"),
        ({"qwen2__rope__dimension_count": 8}, r"rope\.dimension_count 8 where heads have 16 numbers"),
        ({"qwen2__attention__value_length": 32}, r"attention\.value_length 32 where heads have 16 numbers"),
    ],
)
def test_unsupported_files_are_refused_by_name(tmp_path: Path, more: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelLoadError, match=told):
        gguf_folder(some_file(tmp_path, **more), tmp_path / "cache")


def test_rows_that_are_not_the_heads_are_named(tmp_path: Path) -> None:
    path = some_file(tmp_path, key="llama", llama__attention__head_count=3, llama__attention__head_count_kv=3)
    with pytest.raises(ModelLoadError, match=r"attn_q with 64 rows, which are not 3 heads"):
        read_gguf(path, torch.float32)


def test_a_type_of_numbers_that_is_not_read_is_named(tmp_path: Path) -> None:
    path = some_file(tmp_path)
    path.write_bytes(path.read_bytes().replace(TYPE_OF_EMBEDDING, TYPE_OF_EMBEDDING[:-4] + struct.pack("<I", 15)))
    with pytest.raises(ModelLoadError, match=r"token_embd\.weight in Q8_K, and F32, F16, Q4_0.* are read"):
        open_gguf(path)


def test_a_damaged_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = some_file(tmp_path)
    whole = path.read_bytes()
    for size in (0, 3, 10, 30, len(whole) // 3, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=r"empty|damaged or cut short|lies beyond its end|not a GGUF file"):
            open_gguf(path)
    path.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(ModelLoadError, match="not a GGUF file: it starts with b'GGML'"):
        open_gguf(path)


def test_a_file_in_parts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = [{name: draw("F16", rng, (2, 4))} for name in ("a", "b")]
    paths = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for path, held in zip(paths, tensors, strict=True):
        write_gguf(path, {"split.no": 0}, held, {})
    assert open_gguf(paths[0]).tensors.keys() == {"a", "b"}
    with pytest.raises(ModelLoadError, match="part 2 of 2; give the first, m-00001-of-00002"):
        open_gguf(paths[1])
    paths[1].unlink()
    with pytest.raises(ModelLoadError, match=r"continues in m-00002-of-00002\.gguf"):
        open_gguf(paths[0])


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_frequencies_of_llama_3(tmp_path: Path, factor: float) -> None:
    """transformers computes the same divisors from the configuration that is read from them."""
    settings = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, **settings}
    config = transformers.LlamaConfig(**{**SHAPE, "hidden_size": 256, "rope_parameters": rope})
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    divisors = (plain / stretched).numpy()
    held = {
        "rope_freqs.weight": plain_blocks("F32", divisors[None]),
        "token_embd.weight": plain_blocks("F32", np.ones((128, 256))),
    }
    path = write_model(tmp_path / "model.gguf", config, "llama", (held, {"rope_freqs.weight": (32,)}, {}))
    found = json.loads((gguf_folder(path, tmp_path / "cache") / "config.json").read_text())["rope_parameters"]
    assert found == rope
    held["rope_freqs.weight"] = plain_blocks("F32", divisors[None] * np.linspace(1, 1.1, 32))
    write_model(path, config, "llama", (held, {"rope_freqs.weight": (32,)}, {}))
    with pytest.raises(ModelLoadError, match="not Llama 3's divisors"):
        gguf_folder(path, tmp_path / "cache")
