"""Loaded weights written to a folder: they are those that were read, and can be served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.shared.control import (
    SaveShardedState,
    ShardedStateSaved,
    Sleep,
    UtilityAnswer,
)

from .harness import MakeEngine, ask, refusal, tokens


def saved_tensors(answer: UtilityAnswer) -> dict[str, torch.Tensor]:
    assert isinstance(answer, ShardedStateSaved)
    tensors: dict[str, torch.Tensor] = {}
    for name in answer.files:
        part = load_file(Path(answer.path) / name)
        assert not tensors.keys() & part.keys()
        tensors |= part
    return tensors


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


def test_a_sleeping_engine_without_weights_cannot_save_them(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    ask(engine, Sleep(level=2))
    assert "weights sleep" in refusal(engine, SaveShardedState(str(tmp_path / "saved"))).message
    assert not (tmp_path / "saved").exists()


def test_a_place_that_cannot_be_written_to(make_engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = refusal(make_engine(), SaveShardedState(str(tmp_path / "file" / "saved")))
    assert (error.code, "cannot be written to" in error.message) == ("engine_state", True)
