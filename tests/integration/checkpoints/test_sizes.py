"""The memory of a folder's weights is known before they are loaded, by the headers of its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.shared.errors import ModelLoadError
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.keeper.cards import weight_bytes_of
from penstock.worker.models.loading.loader import load_model
from penstock.worker.models.weights.movable import ModelWeights

from .conftest import SHAPE, MakePair, save_model, write_folder
from .packing import FORMATS, block_float8, gptq, packed_ints

pytestmark = pytest.mark.usefixtures("compiled")

# Norms, and the rows that packed matrices are filled up with, are no small part of these models.
TOLERANCE = 0.05
WIDE = transformers.LlamaConfig(**{**SHAPE, "hidden_size": 256, "intermediate_size": 512})
SMALL = {"num_hidden_layers": 1, "hidden_size": 192, "head_dim": 16, "moe_intermediate_size": 64}
MIXTURE = {**SHAPE, **SMALL, "num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True}
EXPERTS = transformers.Qwen3MoeConfig(**MIXTURE)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(WIDE, tmp_path_factory.mktemp("wide"))


def assert_estimated(folder: Path, **options: Any) -> None:
    config = EngineConfig(model=str(folder), max_model_len=64, **options)
    model = load_model(config, folder)
    actual = ModelWeights(model.weights, lambda: model.weights).num_bytes
    assert weight_bytes_of(config) == pytest.approx(actual, rel=TOLERANCE)


@pytest.mark.parametrize("name", FORMATS)
def test_integers_stay_and_other_formats_are_widened(make_pair: MakePair, wide: Path, name: str) -> None:
    folder, _ = make_pair(FORMATS[name], wide)
    assert_estimated(folder)
    assert_estimated(folder, dtype="bfloat16")


@pytest.mark.parametrize("packing", [gptq(group=8), packed_ints(8, symmetric=False), packed_ints(2, group=128)])
def test_integers_in_groups_of_any_size(make_pair: MakePair, wide: Path, packing: Any) -> None:
    assert_estimated(make_pair(packing, wide)[0])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_that_are_quantized_when_they_are_loaded(make_pair: MakePair, wide: Path, quantization: str) -> None:
    packed, plain = make_pair(FORMATS["fp8_blocks"], wide)
    for folder in (packed, plain):
        assert_estimated(folder, quantization=quantization, dtype="bfloat16")


def test_experts_and_an_output_layer_that_is_shared_with_the_embedding(make_pair: MakePair, tmp_path: Path) -> None:
    folder, _ = make_pair(block_float8((16, 16)), save_model(EXPERTS, tmp_path / "source"))
    assert_estimated(folder, dtype="bfloat16")
    generates, pools = (weight_bytes_of(EngineConfig(model=str(folder), runner=each)) for each in ("auto", "pooling"))
    assert generates - pools == 4 * EXPERTS.vocab_size * EXPERTS.hidden_size


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1, "intermediate_size": 64}
    config = transformers.GptOssConfig(**{**SHAPE, **more}, head_dim=16, sliding_window=8)
    source = save_model(config, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.full((experts, outputs, inputs // 32, 16), 0x21, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), 125, dtype=torch.uint8)
    folder = write_folder(tmp_path / "packed", source, tensors, quantization_config={"quant_method": "mxfp4"})
    assert_estimated(folder, dtype="bfloat16")


def test_a_plain_folder_in_another_dtype_than_its_files(wide: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(wide / "model.safetensors").items()}
    folder = write_folder(tmp_path / "halves", wide, tensors, dtype="bfloat16")
    assert_estimated(folder)
    assert_estimated(folder, dtype="float32")


def test_a_file_that_is_missing_or_damaged_is_named(wide: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "cut", wide, load_file(wide / "model.safetensors"))
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content[:5], content[:50], b"\xff" * 64):
        file.write_bytes(damaged)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors is damaged or cut short; fetch it again"):
            weight_bytes_of(EngineConfig(model=str(folder)))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"one\.safetensors cannot be read: No such file or directory"):
        weight_bytes_of(EngineConfig(model=str(folder)))


def test_quantized_tensors_that_do_not_fit_are_an_error_of_their_model(make_pair: MakePair, wide: Path) -> None:
    packed, _ = make_pair(gptq(), wide)
    file, layer = packed / "model.safetensors", "model.layers.0.self_attn.q_proj"
    tensors = load_file(file)
    save_file({**tensors, f"{layer}.scales": torch.zeros(0, 4)}, file)
    with pytest.raises(ModelLoadError, match="do not fit each other; fetch the model again"):
        weight_bytes_of(EngineConfig(model=str(packed)))


def test_the_shape_of_a_packed_weight_in_either_integer(make_pair: MakePair, wide: Path) -> None:
    packed, _ = make_pair(packed_ints(), wide)
    file, config = packed / "model.safetensors", EngineConfig(model=str(packed))
    tensors, expected = load_file(file), weight_bytes_of(config)
    shapes = {name: tensor for name, tensor in tensors.items() if name.endswith("weight_shape")}
    save_file(tensors | {name: tensor.int() for name, tensor in shapes.items()}, file)
    assert weight_bytes_of(config) == expected
    save_file(tensors | {name: tensor.float() for name, tensor in shapes.items()}, file)
    with pytest.raises(ModelLoadError, match="is damaged or cut short"):
        weight_bytes_of(config)


def test_files_of_torch_count_by_their_size(wide: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "torch", wide, {})
    (folder / "model.safetensors").unlink()
    torch.save(load_file(wide / "model.safetensors"), folder / "pytorch_model.bin")
    size = (folder / "pytorch_model.bin").stat().st_size
    assert weight_bytes_of(EngineConfig(model=str(folder))) == size
    save_file({"adapter": torch.zeros(3)}, folder / "adapter_model.safetensors")
    assert weight_bytes_of(EngineConfig(model=str(folder))) == size
