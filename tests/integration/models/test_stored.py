"""A model that was loaded once is loaded without transformers, and computes the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import build_engine
from penstock.worker.models.checkpoint.stored_path import packed_path, stored_path
from penstock.worker.models.lean.native import NativeForward
from penstock.worker.models.loaded import LoadedModel
from penstock.worker.models.loading import packed_weights, stored
from penstock.worker.models.loading.loader import load_model
from penstock.worker.models.loading.stored import StoredModel, load_stored

from .lean_models import BLOCK_SIZE, NUM_BLOCKS, VARIANTS_WITH_STATES, make_model, steps

pytestmark = pytest.mark.usefixtures("compiled", "own_cache")


def write_model(folder: Path, variant: str, dtype: torch.dtype = torch.float32) -> EngineConfig:
    model = make_model(variant, dtype, eos_token_id=2)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}})
    )
    return EngineConfig(model=str(folder), block_size=BLOCK_SIZE, max_model_len=64)


def logits_of(model: LoadedModel) -> list[torch.Tensor]:
    forward = model.forward
    forward.allocate(NUM_BLOCKS, BLOCK_SIZE, 3, torch.device("cpu"))
    results = []
    for step in steps():
        results.append(forward.run(step).clone())
        forward.commit()
    return results


def stored_file(config: EngineConfig) -> Path:
    path = stored_path(config, Path(config.model))
    assert path is not None
    return path


def packed_file(config: EngineConfig) -> Path:
    path = packed_path(config, Path(config.model))
    assert path is not None
    return path


def change_stored(config: EngineConfig, **fields: Any) -> None:
    path = stored_file(config)
    before = msgspec.msgpack.decode(path.read_bytes(), type=StoredModel)
    path.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(before, **fields)))


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *((variant, torch.bfloat16) for variant in VARIANTS_WITH_STATES),
        *((variant, torch.float32) for variant in ("llama", "mixtral", "gemma4", "gpt oss", "lfm2")),
    ],
)
@torch.inference_mode()
def test_stored_model_computes_the_same_bits(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = write_model(tmp_path / "model", variant, dtype)
    first = load_model(config, Path(config.model))
    second = load_stored(config, Path(config.model))
    if second is None:
        # The files of some families hold experts one by one, or have other names.
        assert not isinstance(first.forward, NativeForward) or first.weight_conversions
        return
    assert isinstance(second.forward, NativeForward)
    for ours, theirs in zip(logits_of(second), logits_of(first), strict=True):
        assert torch.equal(ours, theirs)
    for field in ("architecture", "max_model_len", "vocab_size", "eos_token_ids", "num_parameters", "dtype"):
        assert getattr(second, field) == getattr(first, field)


@pytest.mark.parametrize("variant", ["llama, with biases, wide heads and scaled rope", "gemma4, with experts", "lfm2"])
@torch.inference_mode()
def test_packed_weights_compute_the_same_bits(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = msgspec.structs.replace(write_model(tmp_path / "model", variant, torch.bfloat16), quantization="int8")
    first = load_model(config, Path(config.model))
    monkeypatch.setattr(stored, "pack_linear_layers", None)  # not called
    second = load_stored(config, Path(config.model))
    assert second is not None
    for ours, theirs in zip(logits_of(second), logits_of(first), strict=True):
        assert torch.equal(ours, theirs)


@torch.inference_mode()
def test_four_bits_are_chosen_once(tmp_path: Path) -> None:
    config = msgspec.structs.replace(write_model(tmp_path / "model", "llama"), quantization="int4")
    first = load_model(config, Path(config.model))
    second = load_stored(config, Path(config.model))
    assert second is not None
    for ours, theirs in zip(logits_of(second), logits_of(first), strict=True):
        assert torch.equal(ours, theirs)
    packed_file(config).unlink()
    assert load_stored(config, Path(config.model)) is None


def _flip(content: bytearray) -> None:
    content[-100] ^= 1


def _cut(content: bytearray) -> None:
    del content[len(content) // 2 :]


def _empty(content: bytearray) -> None:
    content.clear()


@pytest.mark.parametrize("damage", [_flip, _cut, _empty])
@pytest.mark.parametrize("quantization", ["int8", "int4-mixed"])
def test_damaged_packed_weights_are_packed_again(
    damage: Callable[[bytearray], None], quantization: str, tmp_path: Path
) -> None:
    config = msgspec.structs.replace(write_model(tmp_path / "model", "llama"), quantization=quantization)
    load_model(config, Path(config.model))
    intact = packed_file(config).read_bytes()
    content = bytearray(intact)
    damage(content)
    packed_file(config).write_bytes(content)
    if load_stored(config, Path(config.model)) is None:
        load_model(config, Path(config.model))
    assert packed_file(config).read_bytes() == intact


def test_packed_weights_are_removed_by_their_total_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = []
    for name in ("a", "b", "c"):
        config = msgspec.structs.replace(write_model(tmp_path / name, "llama"), quantization="int8")
        load_model(config, Path(config.model))
        if name == "a":
            monkeypatch.setattr(packed_weights, "_MAX_BYTES", 2 * packed_file(config).stat().st_size)
        # Times of files may be equal on a coarse clock.
        os.utime(packed_file(config), ns=(len(configs), len(configs)))
        configs.append(config)
    assert [packed_file(config).is_file() for config in configs] == [False, True, True]


@pytest.mark.parametrize("change", ["model", "option", "code", "processor"])
def test_stored_model_is_used_only_for_what_it_was_stored_for(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_model(tmp_path / "model", "llama")
    load_model(config, Path(config.model))
    assert load_stored(config, Path(config.model)) is not None
    if change == "model":
        os.utime(tmp_path / "model" / "model.safetensors", ns=(0, 0))
    elif change == "option":
        config = msgspec.structs.replace(config, quantization="int8")
    elif change == "code":
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "linear.cpp").write_text("// another build")
        monkeypatch.setattr(stored, "_PACKAGE", tmp_path)
    else:
        monkeypatch.setattr(stored, "this_processor", lambda: ("another processor", []))
    assert load_stored(config, Path(config.model)) is None
    load_model(config, Path(config.model))
    assert load_stored(config, Path(config.model)) is not None


def test_stored_model_that_gives_other_results_is_loaded_from_the_beginning(tmp_path: Path) -> None:
    config = write_model(tmp_path / "model", "llama")
    load_model(config, Path(config.model))
    plan = msgspec.msgpack.decode(stored_file(config).read_bytes(), type=StoredModel).plan
    layers = [msgspec.structs.replace(layer, residual_scale=0.5) for layer in plan.layers]
    change_stored(config, plan=msgspec.structs.replace(plan, layers=tuple(layers)))
    assert load_stored(config, Path(config.model)) is None
    refusal = msgspec.msgpack.decode(stored_file(config).read_bytes(), type=StoredModel).refusal
    assert "logits differ" in refusal
    # The refusal stays, so that the next start does not try again.
    load_model(config, Path(config.model))
    assert load_stored(config, Path(config.model)) is None


@pytest.mark.parametrize("content", [b"", b"\xc1", msgspec.msgpack.encode({"build": "x"})])
def test_damaged_file_is_not_used(content: bytes, tmp_path: Path) -> None:
    config = write_model(tmp_path / "model", "llama")
    load_model(config, Path(config.model))
    stored_file(config).write_bytes(content)
    assert load_stored(config, Path(config.model)) is None
    load_model(config, Path(config.model))
    assert load_stored(config, Path(config.model)) is not None


def test_only_the_newest_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_MAX_FILES", 2)
    config = write_model(tmp_path / "model", "llama")
    lengths = (16, 32, 48)
    configs = [msgspec.structs.replace(config, max_model_len=length) for length in lengths]
    for each in configs:
        load_model(each, Path(config.model))
    assert [load_stored(each, Path(config.model)) is not None for each in configs] == [False, True, True]


_BUILD = """
import sys
from pathlib import Path
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import build_engine

config = EngineConfig(model=sys.argv[1], kv_cache_memory=1 << 22, quantization="int8")
for _ in range(2):
    build_engine(config, Path(config.model)).close()
    for path in Path(sys.argv[2]).rglob("*.weights"):
        path.unlink()
print(sorted(name for name in ("transformers", "torch._dynamo", "torch._inductor", "sympy") if name in sys.modules))
"""


def test_later_engines_of_a_model_import_no_transformers(tmp_path: Path, own_cache: Path) -> None:
    """Its norms have an offset, which is added to weights without content, too."""
    config = write_model(tmp_path / "model", "gemma3")
    # The first engine may import transformers, so it runs in this process, which has done so already.
    config = EngineConfig(model=config.model, kv_cache_memory=1 << 22, quantization="int8")
    build_engine(config, Path(config.model)).close()
    assert list(own_cache.rglob("*.weights"))
    # Two of the others: with packed weights and without.
    command = [sys.executable, "-c", _BUILD, config.model, str(own_cache)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1] == "[]"
