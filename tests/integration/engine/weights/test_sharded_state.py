"""Weights written to a folder: they are those in memory, whatever the files say by now, and can be served."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.shared.control.calls import UtilityAnswer
from penstock.shared.control.engine import ResetPrefixCache, Sleep
from penstock.shared.control.model import SaveShardedState, ShardedStateSaved
from penstock.worker.engine.composition import Engine

from ....conftest import DEMO_MODEL
from ...models.lean_models import make_model
from ..harness import MakeEngine, ask, refusal, tokens


def saved_tensors(answer: UtilityAnswer) -> dict[str, torch.Tensor]:
    assert isinstance(answer, ShardedStateSaved)
    tensors: dict[str, torch.Tensor] = {}
    for name in answer.files:
        part = load_file(Path(answer.path) / name)
        assert not tensors.keys() & part.keys()
        tensors |= part
    return tensors


def double_norms(engine: Engine) -> None:
    """Change weights where they lie, as a registered method may."""
    for name, weight in engine.control._parts.rpc_engine.model.network.named_parameters():
        if name.endswith(("input_norm.weight", "mlp_norm.weight")):
            weight.data *= 2


def test_saved_weights_are_those_that_were_loaded(make_engine: MakeEngine, packed_model: Path, tmp_path: Path) -> None:
    original = load_file(packed_model / "model.safetensors")
    engine = make_engine()
    answer = ask(engine, SaveShardedState(str(tmp_path / "new" / "saved"), None, 1_000_000))
    assert isinstance(answer, ShardedStateSaved)
    assert answer.files == [f"model-rank-0-part-{part}.safetensors" for part in range(len(answer.files))]
    assert len(answer.files) > 2
    tensors = saved_tensors(answer)
    assert tensors.keys() == original.keys()
    for name, tensor in original.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name
    sizes = [sum(t.nbytes for t in load_file(Path(answer.path) / name).values()) for name in answer.files]
    assert max(sizes) <= 1_000_000
    again = refusal(engine, SaveShardedState(answer.path))
    assert (again.code, "is not empty" in again.message) == ("engine_state", True)


@pytest.mark.parametrize(
    ("architecture", "options"), [("gpt_oss", {}), ("gemma2", {}), ("llama", {"dtype": "bfloat16"})]
)
def test_saved_weights_can_be_served(
    make_engine: MakeEngine,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    architecture: str,
    options: dict[str, Any],
) -> None:
    engine = make_engine(model_folder(architecture), **options)
    answer = ask(engine, SaveShardedState(str(tmp_path / "saved"), "weights-{part}.safetensors", 50_000))
    assert isinstance(answer, ShardedStateSaved)
    served = make_engine(Path(answer.path))
    assert served.ready.dtype == engine.ready.dtype
    assert tokens(served) == tokens(engine)
    if not options:
        original = load_file(model_folder(architecture) / "model.safetensors")
        assert saved_tensors(answer).keys() == original.keys()


@pytest.mark.parametrize("variant", ["llama, tied embeddings and as many key heads", "qwen3 moe, with a dense layer"])
def test_the_saved_state_is_read_from_memory(make_engine: MakeEngine, variant: str, tmp_path: Path) -> None:
    """The files were deleted and the weights in memory changed: memory is saved under the files' names."""
    model = make_model(variant, torch.float32, eos_token_id=2)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    shutil.copyfile(DEMO_MODEL / "tokenizer.json", folder / "tokenizer.json")
    original = load_file(folder / "model.safetensors")
    engine = make_engine(folder)
    assert engine.ready.architecture == type(model).__name__
    (folder / "model.safetensors").unlink()
    double_norms(engine)
    tensors = saved_tensors(ask(engine, SaveShardedState(str(tmp_path / "saved"))))
    assert tensors.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(tensors[name], tensor * 2 if name.endswith("layernorm.weight") else tensor), name
    assert tokens(make_engine(tmp_path / "saved")) == tokens(engine)


def test_saved_state_of_transformed_weights_gives_the_same_tokens(
    make_engine: MakeEngine, packed_model: Path, tmp_path: Path
) -> None:
    """Covers loading with ``load_format`` "sharded_state"."""
    engine = make_engine(packed_model, dtype="bfloat16")
    before = tokens(engine)
    double_norms(engine)
    ask(engine, ResetPrefixCache())
    changed = tokens(engine)
    assert changed != before
    ask(engine, SaveShardedState(str(tmp_path / "saved")))
    served = make_engine(tmp_path / "saved", load_format="sharded_state")
    assert served.ready.dtype == "bfloat16"
    assert tokens(served) == changed


@pytest.mark.parametrize("quantization", ["int8", "int4-mixed", "int4"])
def test_rounded_weights_are_not_saved(make_engine: MakeEngine, quantization: str, tmp_path: Path) -> None:
    error = refusal(make_engine(quantization=quantization), SaveShardedState(str(tmp_path / "saved")))
    assert error.code == "engine_state"
    assert f"holds its weights in {quantization} alone" in error.message
    assert not any((tmp_path / "saved").glob("*"))


def test_a_sleeping_engine_without_weights_cannot_save_them(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    ask(engine, Sleep(level=2))
    assert "weights sleep" in refusal(engine, SaveShardedState(str(tmp_path / "saved"))).message
    assert not (tmp_path / "saved").exists()


def test_a_place_that_cannot_be_written_to(make_engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = refusal(make_engine(), SaveShardedState(str(tmp_path / "file" / "saved")))
    assert (error.code, "cannot be written to" in error.message) == ("engine_state", True)
