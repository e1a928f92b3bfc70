"""A checkpoint is served whole or refused by the names of its tensors; what is known to be left over does no harm."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.shared.control.engine import Sleep, WakeUp
from penstock.shared.errors import ModelLoadError
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.models.checkpoint.folder import resolve_model_folder
from penstock.worker.models.loading.loader import load_model

from ..harness import SHAPE, MakeEngine, ask, refusal, tokens

Weights = dict[str, Tensor]
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.1.w1.weight"
HALVES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the Llama folder that a test may spoil."""
    return shutil.copytree(model_folder("llama"), tmp_path / "model")


@pytest.fixture
def make_folder(folder: Path, tmp_path: Path) -> Callable[[transformers.PreTrainedModel], Path]:
    """Save a model with the Llama folder's tokenizer."""

    def make(module: transformers.PreTrainedModel) -> Path:
        target = tmp_path / "made"
        module.save_pretrained(target)
        shutil.copyfile(folder / "tokenizer.json", target / "tokenizer.json")
        return target

    return make


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_weights(folder: Path, edit: Callable[[Weights], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def spoil(weights: Weights, name: str, value: float = float("nan")) -> None:
    weights[name].view(-1)[5] = value


def shard(folder: Path) -> None:
    """Cut the weights into two files with an index."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = dict(zip(HALVES, (names[: len(names) // 2], names[len(names) // 2 :]), strict=True))
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def load(folder: Path, **options: Any) -> None:
    config = EngineConfig(model=str(folder), **options)
    load_model(config, resolve_model_folder(config.model))


def told(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder, **options)
    message = str(caught.value)
    assert len(message) < 1000
    return message


def test_a_missing_tensor_is_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edit_weights(folder, lambda weights: weights.pop(Q_PROJ))
    message = told(folder)
    assert message.startswith(f"LlamaForCausalLM in {folder} cannot be served")
    assert f"1 tensor that it needs is in none of its files: {Q_PROJ}. Fetch the model again" in message
    # It is said once, not in a table of transformers' besides.
    assert "REPORT" not in capfd.readouterr().err


def test_a_missing_tensor_of_a_pickled_checkpoint_is_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    load(folder)
    del weights[Q_PROJ]
    torch.save(weights, folder / "pytorch_model.bin")
    assert f"is in none of its files: {Q_PROJ}" in told(folder)


def test_more_layers_than_the_files_have(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=6)
    message = told(folder)
    assert "num_hidden_layers is 6 in config.json, and the files lack the whole of layers 4, 5" in message
    assert re.search(
        r"18 tensors that it needs are in none of its files: model\.layers\.4\.\S+, .* and 14 more", message
    )


def test_fewer_layers_than_the_files_have(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3)
    message = told(folder)
    assert "num_hidden_layers is 3 in config.json, and the files have layers 3 as well" in message
    assert "9 tensors of its files have no place in it: model.layers.3.input_layernorm.weight" in message


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"hidden_size": 96, "head_dim": 16}, "hidden_size is 96 in config.json, and 64 in the files"),
        ({"vocab_size": 200}, "vocab_size is 200 in config.json, and 128 in the files"),
        ({"intermediate_size": 100}, "intermediate_size is 100 in config.json, and 96 in the files"),
        (
            {"num_key_value_heads": 4},
            "num_attention_heads is 4, num_key_value_heads is 4, head_dim is 16 in config.json",
        ),
        ({"num_attention_heads": 8}, "num_attention_heads is 8, num_key_value_heads is 2, head_dim is 16"),
    ],
)
def test_a_size_that_is_not_that_of_the_files(folder: Path, fields: dict[str, int], cause: str) -> None:
    edit_config(folder, **fields)
    message = told(folder)
    assert cause in message
    assert re.search(r"another shape than config\.json asks for: \S+ is \[.*\], not \[", message)


def test_experts_that_are_missing_or_too_few(
    make_folder: Callable[[transformers.PreTrainedModel], Path],
) -> None:
    config = transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
    folder = make_folder(transformers.MixtralForCausalLM(config))
    edit_config(folder, num_local_experts=5)
    assert "num_local_experts is 5 in config.json, and 4 in the files" in told(folder)
    edit_config(folder, num_local_experts=4)
    edit_weights(folder, lambda weights: weights.pop(EXPERT))
    assert f"none of its files has {EXPERT}" in told(folder)


def test_files_that_an_index_names(folder: Path) -> None:
    shard(folder)
    load(folder)
    (folder / HALVES[1]).rename(folder / "aside")
    assert f"{INDEX} names {HALVES[1]}, which the folder lacks" in told(folder)
    (folder / "aside").rename(folder / HALVES[1])
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file == HALVES[0]}
    (folder / INDEX).write_text(json.dumps(index))
    assert "the files lack the whole of layers 2, 3" in told(folder)


def test_a_file_that_was_cut_short(folder: Path) -> None:
    shard(folder)
    path = folder / HALVES[0]
    path.write_bytes(path.read_bytes()[:-100])
    assert f"{HALVES[0]} is damaged or cut short" in told(folder)


@pytest.mark.parametrize(
    "extra", ["score.weight", "model.layers.1.self_attn.q_proj.bias", "model.layers.0.mlp.up_proj.weight_scale_inv"]
)
def test_a_tensor_that_nothing_explains_is_refused(folder: Path, extra: str) -> None:
    edit_weights(folder, lambda weights: weights.update({extra: torch.zeros(3)}))
    assert f"1 tensor of its files has no place in it: {extra}" in told(folder)


def test_known_unused_tensors_are_ignored(folder: Path) -> None:
    """Buffers that old files held, and layers that guess tokens ahead."""
    extra = (
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.masked_bias",
        "mtp.layers.0.mlp.up_proj.weight",
        "model.layers.4.eh_proj.weight",
        "model.layers.4.mlp.up_proj.weight",
    )
    edit_weights(folder, lambda weights: weights.update({name: torch.zeros(3) for name in extra}))
    load(folder)


def test_old_masks_of_gpt_neo_are_passed_over(make_folder: Callable[[transformers.PreTrainedModel], Path]) -> None:
    config = transformers.GPTNeoConfig(
        vocab_size=128, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    folder = make_folder(transformers.GPTNeoForCausalLM(config))
    masks = {f"transformer.h.0.attn.attention.{name}": torch.zeros(3) for name in ("bias", "masked_bias")}
    edit_weights(folder, lambda weights: weights.update(masks))
    load(folder)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_model_saved_without_a_head_is_served_if_the_head_is_tied(
    make_folder: Callable[[transformers.PreTrainedModel], Path], is_tied: bool
) -> None:
    folder = make_folder(transformers.LlamaModel(transformers.LlamaConfig(**{**SHAPE, "tie_word_embeddings": is_tied})))
    if not is_tied:
        assert "is in none of its files: lm_head.weight" in told(folder, runner="generate")
        return
    load(folder, runner="generate")
    edit_config(folder, num_hidden_layers=3)
    assert "the files have layers 3 as well" in told(folder)


def test_the_text_model_of_a_vision_model_is_served(
    make_folder: Callable[[transformers.PreTrainedModel], Path],
) -> None:
    """The vision encoder is not loaded and not reported as missing."""
    vision = {
        "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32,
        "projector_output_dim": 32,
    }  # fmt: skip
    text = {**SHAPE, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": 32}
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    folder = make_folder(transformers.Llama4ForConditionalGeneration(config))
    assert any(name.startswith("vision_model.") for name in load_file(folder / "model.safetensors"))
    load(folder)
    edit_config(
        folder, text_config={**json.loads((folder / "config.json").read_text())["text_config"], "vocab_size": 99}
    )
    assert "vocab_size is 99 in config.json, and 128 in the files" in told(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [Q_PROJ, "lm_head.weight"])
def test_weights_that_are_no_numbers_are_named(folder: Path, name: str, value: float) -> None:
    edit_weights(folder, lambda weights: spoil(weights, name, value))
    message = told(folder)
    assert message.startswith(
        f"LlamaForCausalLM cannot be served: there is NaN or infinity in 1 of its tensors: {name}."
    )
    assert "batched" not in message


def test_a_model_that_float16_is_too_narrow_for(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights["model.norm.weight"].fill_(60_000.0))
    load(folder)
    assert "float16 may be too narrow for it: use dtype bfloat16" in told(folder, dtype="float16")


def test_reloaded_checkpoints_must_be_complete_too(make_engine: MakeEngine, packed_model: Path) -> None:
    engine = make_engine()
    before = tokens(engine)
    whole = (packed_model / "model.safetensors").read_bytes()
    ask(engine, Sleep(level=2))
    edit_weights(packed_model, lambda weights: weights.pop(Q_PROJ))
    assert f"is in none of its files: {Q_PROJ}" in refusal(engine, WakeUp()).message
    (packed_model / "model.safetensors").write_bytes(whole)
    edit_weights(packed_model, lambda weights: spoil(weights, Q_PROJ))
    assert f"NaN or infinity in 1 of its tensors: {Q_PROJ}" in refusal(engine, WakeUp()).message
    (packed_model / "model.safetensors").write_bytes(whole)
    ask(engine, WakeUp())
    assert tokens(engine) == before
