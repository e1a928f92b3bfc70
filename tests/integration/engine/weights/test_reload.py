"""Other weights for a loaded engine: it computes what an engine does that began with them, or all is as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.shared.control.engine import Sleep, WakeUp
from penstock.shared.control.model import ReloadWeights, SaveShardedState, WeightsReloaded
from penstock.shared.messages.core import UtilityCall
from penstock.worker.engine.composition import Engine
from penstock.worker.engine.control.reload import WeightsLostError

from ..harness import MakeEngine, ask, refusal, request, tokens

PROMPT = list(range(5, 45))


def changed_copy(folder: Path, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor] | None = None) -> Path:
    """The same model with other numbers."""
    generator = torch.Generator().manual_seed(7)

    def shake(_: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + tensor.std() * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    shutil.copytree(folder, target)
    held = load_file(folder / "model.safetensors")
    changed = {name: (change or shake)(name, tensor) if tensor.ndim > 1 else tensor for name, tensor in held.items()}
    save_file(changed, target / "model.safetensors", {"format": "pt"})
    return target


def reload(engine: Engine, folder: Path, **fields: Any) -> WeightsReloaded:
    answer = ask(engine, ReloadWeights(path=str(folder), **fields))
    assert isinstance(answer, WeightsReloaded)
    return answer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"quantization": "int4-mixed"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"kv_cache_dtype": "int8"},
        {"native_kernels": False},
        {"async_scheduling": True, "deterministic": True},
        {"kv_offload_memory": 1 << 22},
    ],
    ids=str,
)
def test_reloaded_weights_give_the_tokens_of_a_fresh_engine(
    make_engine: MakeEngine, packed_model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Reloading the first weights leaves no trace of the others in caches, scales or layouts."""
    other = changed_copy(packed_model, tmp_path / "other")
    engine, wanted = make_engine(**options), tokens(make_engine(other, **options))
    before = tokens(engine)
    assert before != wanted
    first = engine.ready.weights_version
    answer = reload(engine, other)
    assert (answer.path, answer.former_version) == (str(other), first)
    assert len(answer.version) == 12
    assert answer.version != first
    assert tokens(engine) == wanted
    assert reload(engine, packed_model, version="the first").version == "the first"
    assert tokens(engine) == before
    assert reload(engine, other).former_version == "the first"


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "qwen3"])
def test_models_of_other_forms(
    make_engine: MakeEngine, model_folder: Callable[[str], Path], tmp_path: Path, architecture: str
) -> None:
    folder = model_folder(architecture)
    other = changed_copy(folder, tmp_path / "other")
    engine = make_engine(folder)
    tokens(engine)
    reload(engine, other)
    assert tokens(engine) == tokens(make_engine(other))


def test_sleep_and_saving_follow_the_folder(make_engine: MakeEngine, packed_model: Path, tmp_path: Path) -> None:
    other = changed_copy(packed_model, tmp_path / "other")
    engine = make_engine()
    reload(engine, other)
    wanted = tokens(engine)
    ask(engine, Sleep(level=2))
    assert "sleep; wake them up first" in refusal(engine, ReloadWeights(path=str(packed_model))).message
    ask(engine, WakeUp())
    assert tokens(engine) == wanted
    ask(engine, SaveShardedState(str(tmp_path / "saved")))
    assert tokens(make_engine(tmp_path / "saved")) == wanted


def test_scales_of_an_eight_bit_cache_follow_weights_that_were_replaced_during_a_sleep(
    make_engine: MakeEngine, packed_model: Path, tmp_path: Path
) -> None:
    larger = changed_copy(packed_model, tmp_path / "larger", lambda name, t: t * 64 if "v_proj" in name else t)
    engine = make_engine(kv_cache_dtype="fp8_e4m3")
    before = [call.cache_format for call in network_calls(engine)]
    ask(engine, Sleep(level=2))
    shutil.copyfile(larger / "model.safetensors", packed_model / "model.safetensors")
    ask(engine, WakeUp())
    after = [call.cache_format for call in network_calls(engine)]
    assert after != before
    fresh = make_engine(larger, kv_cache_dtype="fp8_e4m3")
    assert after == [call.cache_format for call in network_calls(fresh)]
    assert tokens(engine) == tokens(fresh)


def network_calls(engine: Engine) -> list[Any]:
    return engine.control._parts.rpc_engine.model.forward.attention_calls


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def other_shapes(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    held["model.norm.weight"] = torch.ones(3)
    save_file(held, folder / "model.safetensors", {"format": "pt"})


def one_missing(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    del held["model.norm.weight"]
    save_file(held, folder / "model.safetensors", {"format": "pt"})


def not_a_number(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    held["model.norm.weight"][3] = torch.nan
    save_file(held, folder / "model.safetensors", {"format": "pt"})


def other_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": "0.9"}))


def halved(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: edit_config(folder, rope_theta=5.0), "rope_theta is 5.0 in its config.json"),
        (lambda folder: edit_config(folder, architectures=["LlamaForCausalLM"]), "architectures is"),
        (other_shapes, "model.norm.weight is [3] there, and [256] here"),
        (one_missing, "model.norm.weight"),
        (not_a_number, "NaN"),
        (other_tokenizer, "its tokenizer.json is another one"),
        (halved, "cannot be loaded"),
        (shutil.rmtree, "does not exist"),
    ],
)
def test_weights_of_another_model_are_refused_and_the_old_ones_keep_serving(
    make_engine: MakeEngine, packed_model: Path, tmp_path: Path, spoil: Callable[[Path], None], told: str
) -> None:
    other = changed_copy(packed_model, tmp_path / "other")
    engine = make_engine()
    before = tokens(engine)
    spoil(other)
    error = refusal(engine, ReloadWeights(path=str(other)))
    assert error.code == "model_load_error"
    assert told in error.message
    assert tokens(engine) == before
    assert engine.control.weights_version == engine.ready.weights_version


def test_weights_that_cannot_be_used_are_put_away_again(
    make_engine: MakeEngine, packed_model: Path, tmp_path: Path
) -> None:
    """If the former weights cannot be used either, the core ends."""
    other = changed_copy(packed_model, tmp_path / "other")
    engine = make_engine()
    before = tokens(engine)
    reloading = engine.control._parts.reload
    failures = iter([RuntimeError("no kernel for these"), None, RuntimeError("first"), RuntimeError("second")])

    def fail() -> None:
        if failure := next(failures):
            raise failure

    reloading._try_out = fail
    error = refusal(engine, ReloadWeights(path=str(other)))
    assert error.code == "engine_call_failed"
    assert "the former ones serve on: RuntimeError: no kernel for these" in error.message
    assert tokens(engine) == before
    with pytest.raises(WeightsLostError):
        engine.control.answer(UtilityCall(1, ReloadWeights(path=str(other))))


def test_weights_do_not_change_under_a_request(make_engine: MakeEngine, packed_model: Path, tmp_path: Path) -> None:
    other = changed_copy(packed_model, tmp_path / "other")
    engine = make_engine()
    engine.core.add_request(request("r", PROMPT))
    engine.core.step_fn()
    assert "weights cannot change while requests run" in refusal(engine, ReloadWeights(path=str(other))).message
    answer = reload(engine, other, only_check=True)
    assert (answer.load_time_s, answer.former_version) == (0.0, engine.ready.weights_version)
    assert engine.control.weights_version == engine.ready.weights_version
