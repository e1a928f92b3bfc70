"""A GGUF file of every architecture is the model that was written: its weights, its tokens, its names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.shared.errors import ModelLoadError
from penstock.worker.models.gguf import container
from penstock.worker.models.gguf.architectures import ARCHITECTURES, VARIANTS
from penstock.worker.models.gguf.blocks import UNPACK
from penstock.worker.models.gguf.container import GgufFile, open_gguf
from penstock.worker.models.gguf.families import Family
from penstock.worker.models.gguf.folder import gguf_folder
from penstock.worker.models.gguf.tensors import read_gguf
from penstock.worker.models.pooling.folder import PoolingFolder

from .gguf_converter import CONVERSIONS, drawn_model, gguf, write_converted
from .loading import PROMPT, embedding, load, tokens

NUM_TOKENS = 24


@pytest.mark.parametrize("model_type", CONVERSIONS)
def test_a_file_gives_the_tokens_of_its_model(model_type: str, tmp_path: Path) -> None:
    model: Any = drawn_model(model_type)
    path = write_converted(tmp_path / "model.gguf", model, model_type)
    folder = gguf_folder(path, tmp_path / "cache")
    loaded = load(folder)
    assert type(loaded) is type(model)
    weights = loaded.state_dict()
    assert weights.keys() == model.state_dict().keys()
    stored = {} if CONVERSIONS[model_type].folds else model.state_dict()
    for name, tensor in stored.items():
        torch.testing.assert_close(weights[name], tensor, msg=lambda text, name=name: f"{name}: {text}")
    prompt = torch.tensor([PROMPT])
    expected = model.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)[0, len(PROMPT) :]
    assert len(expected.unique()) > 4
    assert tokens(folder) == expected.tolist()


@pytest.mark.parametrize(
    ("model_type", "mode"),
    [("bert", "mean"), ("nomic_bert", "mean"), ("gemma3_text embedder", "mean"), ("modernbert", "cls")],
)
def test_a_file_gives_the_embeddings_of_its_model(model_type: str, mode: str, tmp_path: Path) -> None:
    model: Any = drawn_model(model_type)
    folder = gguf_folder(write_converted(tmp_path / "model.gguf", model, model_type), tmp_path / "cache")
    assert PoolingFolder.read(folder).mode == mode
    loaded: Any = load(folder)
    assert type(loaded) is type(model)
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], msg=lambda text, name=name: f"{name}: {text}")
    states = model(torch.tensor([PROMPT])).last_hidden_state[0].detach()
    expected = states[0] if mode == "cls" else states.mean(0)
    torch.testing.assert_close(embedding(folder), expected / expected.norm(), rtol=0, atol=1e-5)


# Heads of classifiers and embedders; experts of an architecture of which no mixture was released.
NOT_SERVED = {
    "mistral3": {f"blk.0.ffn_{name}" for name in ("gate_inp", "gate_exps", "up_exps", "down_exps")},
    "glm4": {"blk.0.attn_qkv"},
    "lfm2": {"dense_2"},
    "gemma-embedding": {"dense_2", "dense_3"},
    "bert": {"blk.0.attn_qkv", "cls", "cls.output"},
    "nomic-bert": {"position_embd"},
    "modern-bert": {"cls", "cls.output", "cls.norm"},
}
HYPERPARAMETERS = {
    "block_count": 1,
    "embedding_length": 8,
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
    "attention.key_length_mla": 4,
    "attention.value_length_mla": 2,
    "rope.dimension_count": 2,
    "ssm.group_count": 1,
    "ssm.time_step_rank": 1,
    "ssm.inner_size": 2,
    "ssm.state_size": 1,
}


@pytest.mark.parametrize("key", ARCHITECTURES)
def test_no_tensor_of_an_architecture_is_unknown(key: str) -> None:
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == key)
    file = GgufFile(Path("x.gguf"), {f"{key}.{name}": value for name, value in HYPERPARAMETERS.items()}, {})
    forms = [gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[kind]]
    # Layers that predict further tokens follow the model's.
    names = {form.format(bid=int("nextn" in form)) for form in forms}
    for row in (ARCHITECTURES[key], *VARIANTS.get(key, {}).values()):
        family = Family(file, key, row)
        names = {name for name in names if not any(is_known(family, f"{name}.{kind}") for kind in ("weight", "bias"))}
    assert names == NOT_SERVED.get(key, set())


def is_known(family: Family, name: str) -> bool:
    return [each.name for each in family.targets(name, (4, 4))] != [name]


@pytest.mark.parametrize("kind", UNPACK)
def test_blocks_of_random_bytes_are_unpacked_as_the_package_does(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    if kind in ("F32", "F16", "BF16"):
        count, size = 64, int(kind.removeprefix("B")[1:]) // 8
    else:
        count, size = 64, gguf.GGML_QUANT_SIZES[number][1]
    blocks = np.random.default_rng(0).integers(0, 256, (count, size), dtype=np.uint8)
    if kind == "NVFP4":
        # Its scales have no sign.
        blocks[:, :4] &= 127
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, number).astype(np.float32)
        unpacked = UNPACK[kind](torch.from_numpy(blocks)).numpy()
    # NaN may have any bits.
    assert np.array_equal(unpacked, expected, equal_nan=True)
    assert np.isfinite(expected).mean() > 0.5


@pytest.mark.parametrize("architecture", ["qwen3moe", "minimax-m2"])
def test_a_second_scale_of_nvfp4_multiplies_its_matrix(architecture: str, tmp_path: Path) -> None:
    """Architectures have experts as stacks or each alone."""
    rng, blocks = np.random.default_rng(0), {}
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    for name, shape in (("attn_output", (8,)), ("ffn_up_exps", (3, 8)), ("ffn_gate_exps", (3, 8))):
        blocks[name] = rng.integers(0, 128, (*shape, 36), dtype=np.uint8)
        writer.add_tensor(f"blk.0.{name}.weight", blocks[name], raw_dtype=gguf.GGMLQuantizationType.NVFP4)
        num_scales = shape[0] if len(shape) == 2 else 1
        writer.add_tensor(f"blk.0.{name}.scale", np.arange(1, num_scales + 1, dtype=np.float32) / 4)
        writer.add_tensor(f"blk.0.{name}.input_scale", np.ones(num_scales, np.float32))
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = {name: unpacked_values(each) for name, each in read_gguf(tmp_path / "model.gguf", torch.float32).items()}
    up = UNPACK["NVFP4"](torch.from_numpy(blocks["ffn_up_exps"]).view(-1, 36)).view(3, 8, 64)
    expected = up * torch.tensor([0.25, 0.5, 0.75])[:, None, None]
    if architecture == "qwen3moe":
        actual = torch.stack([tensors[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"] for expert in range(3)])
    else:
        actual = tensors["model.layers.0.mlp.experts.gate_up_proj"][:, 8:]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    dense = UNPACK["NVFP4"](torch.from_numpy(blocks["attn_output"])) / 4
    torch.testing.assert_close(tensors["model.layers.0.self_attn.o_proj.weight"], dense, rtol=0, atol=0)
    assert not any(name.endswith("scale") for name in tensors)


def unpacked_values(tensor: Any) -> torch.Tensor:
    out = torch.empty(tensor.shape)
    tensor.write(out)
    return out


def test_types_by_the_package_are_refused_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("output.weight", np.zeros((1, 50), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ1_S)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert open_gguf(tmp_path / "model.gguf").tensors["output.weight"].shape == (1, 256)
    monkeypatch.setattr(container, "find_spec", lambda _name: None)
    with pytest.raises(ModelLoadError, match=r"output\.weight in IQ1_S, which the package gguf reads; install it"):
        open_gguf(tmp_path / "model.gguf")
