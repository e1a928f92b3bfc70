"""PEFT folders are read whole, or refused by the name of what is not computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from penstock.shared.errors import AdapterFileError, UnsupportedAdapterError
from penstock.worker.models.adapters.peft_folder import LayerMatrices, read_peft_folder

from .peft_folders import ALL, MIXED, R4, R8, Kind, load_base, matrices_of, write_adapter

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model.model."
Q0 = f"{PREFIX}layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(model_folder: Callable[[str], Path]) -> transformers.PreTrainedModel:
    return load_base(model_folder("llama"))


def layers_of(base: nn.Module) -> dict[str, tuple[int, int]]:
    linears = ((name, module) for name, module in base.named_modules() if isinstance(module, nn.Linear))
    return {name: (module.in_features, module.out_features) for name, module in linears if name != "lm_head"}


def read(folder: Path, base: nn.Module, max_rank: int = 64) -> dict[str, LayerMatrices]:
    return read_peft_folder(folder, layers_of(base), torch.float32, max_rank)


@pytest.mark.parametrize("kind", MIXED.values(), ids=MIXED)
def test_matrices_are_read_with_their_scale_applied(
    kind: Kind, base: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    found = read(write_adapter(tmp_path / "a", base, kind, 5), base)
    expected = matrices_of(base, kind, 5)
    assert found.keys() == expected.keys()
    for layer, (a, b) in expected.items():
        assert torch.equal(found[layer].a, a)
        torch.testing.assert_close(found[layer].b, b * kind.rank_and_scale(layer)[1])


# What the configuration alone says is in tests/unit/shared/test_peft_config.py.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA, as where it gets its name": ({"use_dora": True}, "use_dora=True of .* is not served: DoRA"),
    "a rank above the largest": ({"r": 65}, "rank 65, and this engine takes up to 64; start it with --max-lora-rank"),
    "a large rank of a pattern": ({"rank_pattern": {"q_proj": 128}}, "rank 128"),
    "other targets": ({"target_modules": ["k_proj"]}, "matrices of .*, and target_modules leave it out"),
    "targets without tensors": ({"target_modules": [*ALL, "extra_proj"]}, "name 'extra_proj'.* has nothing for it"),
    "another rank than it says": ({"r": 4}, r"with rank 4 the model needs \[4, \d+\]"),
}


@pytest.mark.parametrize(("fields", "words"), REFUSED.values(), ids=REFUSED)
def test_unsupported_adapter_options_are_refused_by_name(
    fields: dict[str, Any], words: str, base: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", base, Kind(config=fields))
    with pytest.raises(UnsupportedAdapterError, match=words):
        read(folder, base)


TENSORS: dict[str, tuple[str, str, str]] = {
    "a magnitude": (f"{Q0}.lora_A.weight", f"{Q0}.lora_magnitude_vector", "the adapter has DoRA"),
    "an embedding": (f"{Q0}.lora_A.weight", "base_model.model.model.embed_tokens.lora_embedding_A", "embeddings"),
    "something": (f"{Q0}.lora_A.weight", f"{Q0}.other", "tensors of an unknown kind"),
    "half of a layer": (f"{Q0}.lora_A.weight", f"{Q0[:-6]}k_proj.lora_A.weight", "one of two matrices"),
    "another layer": (f"{Q0}.lora_A.weight", "", "one of two matrices"),
}


@pytest.mark.parametrize(("name", "becomes", "words"), TENSORS.values(), ids=TENSORS)
def test_tensors_of_other_kinds_are_refused_by_name(
    name: str, becomes: str, words: str, base: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", base, R4)
    tensors = load_file(folder / WEIGHTS)
    tensor = tensors.pop(name)
    save_file({**tensors, **({becomes: tensor} if becomes else {})}, folder / WEIGHTS)
    with pytest.raises(UnsupportedAdapterError, match=words):
        read(folder, base)


def test_the_head_and_layers_of_other_models_are_refused(base: transformers.PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedAdapterError, match=r"changes 'lm_head'.* those are .*q_proj"):
        read(write_adapter(tmp_path / "head", base, Kind(targets=r"(lm|.*layers.*q)_(head|proj)")), base)
    smaller = {name: (num_inputs // 2, num_outputs) for name, (num_inputs, num_outputs) in layers_of(base).items()}
    with pytest.raises(UnsupportedAdapterError, match="the adapter is of another model"):
        read_peft_folder(write_adapter(tmp_path / "larger", base, R8), smaller, torch.float32, 64)


def test_infinities_and_nan_are_refused(base: transformers.PreTrainedModel, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base, R4)
    tensors = load_file(folder / WEIGHTS)
    tensors[f"{Q0}.lora_B.weight"][3, 1] = float("nan")
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(UnsupportedAdapterError, match="hold an infinity or NaN"):
        read(folder, base)


def test_broken_files_may_be_whole_elsewhere(base: transformers.PreTrainedModel, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base, R4)
    weights = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(weights[:-100])
    with pytest.raises(AdapterFileError, match=WEIGHTS) as caught:
        read(folder, base)
    assert caught.value.retryable
    (folder / WEIGHTS).unlink()
    with pytest.raises(AdapterFileError, match=WEIGHTS):
        read(folder, base)
    for text in ("{", "[]"):
        (folder / CONFIG).write_text(text)
        with pytest.raises(AdapterFileError, match=CONFIG):
            read(folder, base)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(UnsupportedAdapterError, match=r"r of .* must be an integer of at least 1, got None"):
        read(folder, base)


def renamed(folder: Path, base: nn.Module, change: Callable[[str], str], *, keeps: bool = False) -> Path:
    """``R4`` with the layers of the first block under other names, and with ``keeps`` under their own as well."""
    written = write_adapter(folder, base, R4)
    tensors = load_file(written / WEIGHTS)
    changed = {change(name): tensor.clone() for name, tensor in tensors.items()}
    save_file({**tensors, **changed} if keeps else changed, written / WEIGHTS)
    return written


@pytest.mark.parametrize("part", ["model.language_model.", "language_model.model.", "model.text_model."])
def test_layers_have_the_names_of_the_model_that_was_trained(
    part: str, base: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    """In a vision model the text decoder is inside another module."""
    whole = renamed(tmp_path / "whole", base, lambda name: name.replace(PREFIX, f"base_model.model.{part}"))
    found = read(whole, base)
    expected = read(write_adapter(tmp_path / "alone", base, R4), base)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[layer].b, expected[layer].b) for layer in expected)
    twice = renamed(tmp_path / "twice", base, lambda name: name.replace(PREFIX, f"base_model.model.{part}"), keeps=True)
    with pytest.raises(UnsupportedAdapterError, match=r"matrices of 'model\.layers\.0.*' by two names; keep one"):
        read(twice, base)


@pytest.mark.parametrize("part", ["model.vision_tower.vision_model.", "visual.", "model.multi_modal_projector."])
def test_layers_that_read_images_are_refused_by_name(
    part: str, base: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    """PEFT's ``target_modules=["q_proj", "v_proj"]`` matches them too."""
    both = renamed(tmp_path / "a", base, lambda name: name.replace(PREFIX, f"base_model.model.{part}"), keeps=True)
    with pytest.raises(UnsupportedAdapterError, match=f"changes '{part}.*which reads images; only the text model's"):
        read(both, base)
