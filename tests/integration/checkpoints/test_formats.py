"""A quantised checkpoint of each format is the model that it stands for, to the bit, and says the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.shared.control.model import SaveShardedState
from penstock.shared.errors import ModelLoadError
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.models.loading.loader import load_model
from penstock.worker.models.weights.live_state import empty_module, live_state
from penstock.worker.models.weights.stored_files import save_sharded_state

from .conftest import SHAPE, MakePair, save_model, write_folder
from .loading import assert_same, load, tokens
from .packing import E2M1, FORMATS, awq, block_float8, gptq, whole

LAYER = "model.layers.0.self_attn.q_proj"
HALVES = ("one.safetensors", "two.safetensors")


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_checkpoint_loads_as_its_dequantized_weights(make_pair: MakePair, name: str) -> None:
    packed, plain = make_pair(FORMATS[name])
    assert_same(load(packed), load(plain))
    found = tokens(packed)
    assert found == tokens(plain)
    # Or tokens would say nothing about weights.
    assert len(set(found)) > 5


def test_weights_are_rounded_once_to_the_dtype_and_quantised_again_on_top(make_pair: MakePair) -> None:
    packed, plain = make_pair(awq())
    assert_same(load(packed, "bfloat16"), load(plain, "bfloat16"))
    options: dict[str, Any] = {"dtype": "bfloat16", "quantization": "int8"}
    assert tokens(packed, **options) == tokens(plain, **options)


def test_experts_tied_embeddings_and_several_files(make_pair: MakePair, tmp_path: Path) -> None:
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.Qwen3MoeConfig(**{**SHAPE, **mixture, "head_dim": 16, "tie_word_embeddings": True})
    packed, plain = make_pair(block_float8((16, 16)), save_model(config, tmp_path / "source"))
    held = load_file(packed / "model.safetensors")
    (packed / "model.safetensors").unlink()
    names = sorted(held)
    for number, file in enumerate(HALVES):
        save_file({name: held[name] for name in names[number::2]}, packed / file)
    weight_map = {name: HALVES[number % 2] for number, name in enumerate(names)}
    (packed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = load(packed)
    assert_same(found, load(plain))
    output: Any = found.get_output_embeddings()
    assert output.weight is found.get_input_embeddings().weight


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    more = {"num_local_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1, "intermediate_size": 64}
    config = transformers.GptOssConfig(**{**SHAPE, **more}, head_dim=16, sliding_window=8)
    source = save_model(config, tmp_path / "source")
    plain, rng = load_file(source / "model.safetensors"), np.random.default_rng(0)
    packed = dict(plain)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = packed.pop(name).shape
        codes = rng.integers(0, 16, (experts, outputs, inputs))
        exponents = rng.integers(123, 126, (experts, outputs, inputs // 32)).astype(np.uint8)
        blocks = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
        packed[f"{name}_blocks"] = torch.from_numpy(blocks.reshape(experts, outputs, inputs // 32, 16))
        packed[f"{name}_scales"] = torch.from_numpy(exponents)
        plain[name] = whole(E2M1[codes], 0, (2.0 ** (exponents - 127.0)).repeat(32, -1)).transpose(1, 2)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    folder = write_folder(tmp_path / "packed", source, packed, quantization_config=settings)
    assert_same(load(folder), load(write_folder(tmp_path / "plain", source, plain)))


def test_older_gptq_files_are_loaded(make_pair: MakePair) -> None:
    """A name of their own, their settings in a file of its own, and biases of zeros for layers that have none."""
    packed, plain = make_pair(gptq())
    held = load_file(packed / "model.safetensors")
    held[f"{LAYER}.bias"] = torch.zeros(64)
    save_file(held, packed / "gptq_model-4bit-32g.safetensors")
    (packed / "model.safetensors").unlink()
    config = json.loads((packed / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (packed / "config.json").write_text(json.dumps(config))
    (packed / "quantize_config.json").write_text(json.dumps(settings))
    assert_same(load(packed), load(plain))
    held[f"{LAYER}.bias"][5] = 1
    save_file(held, packed / "gptq_model-4bit-32g.safetensors")
    with pytest.raises(ModelLoadError, match=rf"no place in it: {LAYER}\.bias"):
        load(packed)


def test_the_saved_state_is_a_plain_checkpoint(make_pair: MakePair, tmp_path: Path) -> None:
    packed, plain = make_pair(FORMATS["int_quantized"])
    config, saved = EngineConfig(model=str(packed), dtype="float32"), tmp_path / "saved"
    call = SaveShardedState(path=str(saved), pattern=None, max_size=None)
    model = load_model(config, packed)
    save_sharded_state(
        model, lambda _: live_state(model, lambda: empty_module(config, packed, model)), [model.folder, packed], call
    )
    assert_same(load(saved), load(plain))


@pytest.mark.parametrize(
    ("name", "end", "damaged", "told"),
    [
        (
            "fp8_blocks",
            "weight_scale_inv",
            None,
            rf"{LAYER}\.weight is in float8, and no file has {LAYER}\.weight_scale",
        ),
        ("fp8_blocks", "weight_scale_inv", (3, 5), r"weight_scale_inv is \[3, 5\].*of \[64, 64\] in blocks of 48 x 32"),
        ("gptq", "qzeros", None, rf"qweight needs {LAYER}\.qzeros"),
        ("gptq", "scales", (5, 64), r"do not fit each other: .*scales \[5, 64\]"),
        ("gptq_8_bits_order", "g_idx", None, rf"an order of its own \(desc_act\), and {LAYER}\.g_idx"),
        ("awq", "scales", (2, 60), r"do not fit each other: .*scales \[2, 60\]"),
        ("packed_int4", "weight_scale", None, rf"{LAYER}\.weight_scale is in no file"),
        (
            "packed_int4",
            "weight_packed",
            (64, 9),
            r"weight_packed is \[64, 9\], which is no weight of \[64, 64\] in 4 bits",
        ),
        ("packed_int4_zeros", "weight_zero_point", (3, 2), "weight_zero_point has not a number for each"),
    ],
)
def test_inconsistent_tensors_are_named(
    make_pair: MakePair, name: str, end: str, damaged: tuple[int, ...] | None, told: str
) -> None:
    packed, _ = make_pair(FORMATS[name])
    held = load_file(packed / "model.safetensors")
    given = held.pop(f"{LAYER}.{end}")
    if damaged is not None:
        held[f"{LAYER}.{end}"] = torch.ones(damaged).to(given.dtype)
    save_file(held, packed / "model.safetensors")
    with pytest.raises(ModelLoadError, match=told):
        load(packed)


def test_words_of_another_type_are_named(make_pair: MakePair) -> None:
    packed, _ = make_pair(FORMATS["gptq"])
    held = load_file(packed / "model.safetensors")
    held[f"{LAYER}.qweight"] = held[f"{LAYER}.qweight"].float()
    save_file(held, packed / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"{LAYER}\.qweight is of F32, and words of I32"):
        load(packed)
