"""The lean path gives what the general way gives, for every family it serves, and holds no second copy of a weight."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

from penstock.kernels import moe
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.models.checkpoint.folder import resolve_model_folder
from penstock.worker.models.lean.forward import LeanForward
from penstock.worker.models.lean.layers.feed_forward import OwnMlp, SparseMlp
from penstock.worker.models.lean.layers.rotation import AngleTable
from penstock.worker.models.lean.reading import feed_forward
from penstock.worker.models.lean.reading.decoder import read_decoder
from penstock.worker.models.loading.loader import load_model
from penstock.worker.models.modes.packed import PackedForward

from .lean_models import COMPILED_ALONE, SETTINGS, SMALL, VARIANTS, logits_of, make_model


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant not in COMPILED_ALONE])
@torch.inference_mode()
def test_logits_are_those_of_the_general_way(variant: str) -> None:
    expected = logits_of(PackedForward(make_model(variant, torch.float32), SETTINGS))
    actual = logits_of(LeanForward(make_model(variant, torch.float32), SETTINGS))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_angles_of_a_position_are_the_same_bits_in_every_step() -> None:
    """Ranks with batch-invariant attention need this."""
    network = LeanForward(make_model("gemma3", torch.float32), SETTINGS).network
    make_angles = AngleTable(network.angles, SETTINGS.max_model_len)
    hidden, every = torch.zeros(1), torch.arange(SETTINGS.max_model_len)
    whole = make_angles(hidden, every)
    for positions in (every[37:38], every[5:40:3], every.flip(0)):
        for made, of_all, own in zip(
            make_angles(hidden, positions), whole, network.angles(hidden, positions), strict=True
        ):
            assert all(map(torch.equal, made, [table[positions] for table in of_all]))
            torch.testing.assert_close(made, own)


@torch.inference_mode()
def test_a_window_counts() -> None:
    windowed = make_model("mistral, with a window", torch.float32)
    wide = make_model("mistral, with a window", torch.float32)
    wide.config.sliding_window = None
    narrow, full = (logits_of(LeanForward(model, SETTINGS))[-1] for model in (windowed, wide))
    assert not torch.allclose(narrow, full)


@torch.inference_mode()
def test_the_original_model_still_works_on_the_fused_weights() -> None:
    model = make_model("qwen2", torch.float32)
    token_ids = torch.arange(9)[None]
    before = model(token_ids).logits
    num_bytes = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    lean = LeanForward(model, SETTINGS)
    model.set_attn_implementation("eager")
    assert torch.equal(model(token_ids).logits, before)
    storages = {
        storage.data_ptr(): storage.nbytes()
        for network in (model, lean.network)
        for storage in (parameter.untyped_storage() for parameter in network.parameters())
    }
    assert sum(storages.values()) <= num_bytes + 1024, "a weight is there twice"


def save(folder: Path, variant: str, **fields: Any) -> Path:
    name, own = VARIANTS[variant]
    cls = getattr(transformers, name)
    cls(cls.config_class(**{**SMALL, **own, **fields})).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_loaded_model_is_lean_and_lets_go_of_transformers_layers(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen3")
    kinds = (Qwen3DecoderLayer, Qwen3Attention)
    before = {id(thing) for thing in gc.get_objects() if type(thing) in kinds}
    model = load_model(EngineConfig(model=str(folder)), resolve_model_folder(str(folder)))
    gc.collect()
    assert model.forward.mode == "lean"
    assert not any(type(thing) in kinds and id(thing) not in before for thing in gc.get_objects())


def test_a_relative_with_an_unknown_part_goes_the_general_way(tmp_path: Path) -> None:
    """Its feed-forward part keeps its original code; no plan describes its change of the queries."""
    folder = save(tmp_path, "llama", hidden_act="sigmoid")
    model = load_model(EngineConfig(model=str(folder)), resolve_model_folder(str(folder)))
    assert model.forward.mode == "lean"
    assert any(isinstance(part, OwnMlp) for part in model.network.modules())


def test_experts_are_read_for_the_device_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on GPUs read the whole model on their host, which has others."""
    monkeypatch.setattr(moe, "has_kernel", lambda device, dtype: device.type == "cuda")
    monkeypatch.setattr(feed_forward, "can_mix_experts", lambda device, dtype, num: device.type == "cpu")
    module = make_model("mixtral", torch.float32)
    kinds = [
        {layer.mlp and layer.mlp.kind for layer in read_decoder(module, SETTINGS.max_model_len, device).layers}
        for device in (None, torch.device("cuda"))
    ]
    assert kinds == [{"routed"}, {"experts"}]


@pytest.mark.parametrize("variant", ["mixtral", "qwen2 moe", "qwen3 moe, with a dense layer"])
@torch.inference_mode()
def test_experts_by_kernels_are_those_of_the_model(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU by the kernels' reference, which a model there is not served by."""
    expected = logits_of(LeanForward(make_model(variant, torch.float32), SETTINGS))
    monkeypatch.setattr(moe, "has_kernel", lambda device, dtype: True)
    monkeypatch.setattr(feed_forward, "can_mix_experts", lambda device, dtype, num: False)
    lean = LeanForward(make_model(variant, torch.float32), SETTINGS)
    assert any(isinstance(part, SparseMlp) for part in lean.network.modules())
    assert not any(isinstance(part, OwnMlp) for part in lean.network.modules())
    for ours, theirs in zip(logits_of(lean), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
