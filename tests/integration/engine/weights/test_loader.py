"""What the loader says about models that it cannot serve, and how it reads those that it can."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.shared.errors import ConfigurationError, ModelLoadError
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.models.attention.paged_attention import _classify
from penstock.worker.models.checkpoint.folder import resolve_model_folder
from penstock.worker.models.loaded import LoadedModel
from penstock.worker.models.loading import loader
from penstock.worker.models.loading.loader import load_model
from penstock.worker.models.loading.reading import ReadModel, read_model

from ..harness import SHAPE


@pytest.fixture
def folder(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the Llama folder that a test may spoil."""
    return shutil.copytree(model_folder("llama"), tmp_path / "model")


def load(folder: Path, **options: Any) -> LoadedModel:
    config = EngineConfig(model=str(folder), **options)
    return load_model(config, resolve_model_folder(config.model))


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ModelLoadError, match=missing):
        load(folder)


@pytest.mark.parametrize("model", ["/no/such/folder", "./nowhere", "~/nowhere", "a/b/c", "models/"])
def test_a_missing_path_is_not_searched_on_the_hub(model: str) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        resolve_model_folder(model)


def test_a_broken_config_and_an_unknown_architecture(folder: Path) -> None:
    edit_config(folder, model_type="no_such_model", architectures=["NoSuchModel"])
    with pytest.raises(ModelLoadError, match="no_such_model"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load(folder)


def test_a_length_that_cannot_be_served_is_refused(folder: Path) -> None:
    told = "max_model_len is 300, but the model serves at most 256 positions here: its config.json says max_position_em"
    with pytest.raises(ConfigurationError, match=told) as caught:
        load(folder, max_model_len=300)
    assert str(caught.value).endswith("max_position_embeddings 256; give 256 or less, or leave it out")
    with pytest.raises(ConfigurationError, match="got 1"):
        load(folder, max_model_len=1)


def test_rope_that_follows_the_longest_request_is_served_only_where_it_does_not(folder: Path) -> None:
    factors = [1.0] * (SHAPE["hidden_size"] // SHAPE["num_attention_heads"] // 2)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": factors,
        "long_factor": [2.0 * f for f in factors],
        "original_max_position_embeddings": 64,
    }
    edit_config(folder, rope_parameters=rope)
    assert load(folder).max_model_len == 64
    with pytest.raises(ConfigurationError, match="at most 64"):
        load(folder, max_model_len=65)


def test_memory_is_returned_when_the_module_that_was_read_is_freed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules: list[weakref.ref[torch.nn.Module]] = []
    are_freed: list[bool] = []

    def read_and_watch(*args: Any) -> ReadModel:
        result = read_model(*args)
        modules.append(weakref.ref(result.module))
        return result

    monkeypatch.setattr(loader, "read_model", read_and_watch)
    monkeypatch.setattr(loader, "return_free_memory", lambda: are_freed.append(modules[0]() is None))
    load(folder)
    assert are_freed == [True]


def test_dtype_and_end_of_sequence(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    model = load(folder, dtype="bfloat16")
    assert (model.dtype, model.eos_token_ids) == (torch.bfloat16, [7, 9])
    (folder / "generation_config.json").unlink()
    model = load(folder)
    assert (model.dtype, model.eos_token_ids) == (torch.float32, [2])


@pytest.mark.parametrize(("eos", "said"), [(128, "'128'"), ([2, 999], "'999'"), (-1, "'-1'"), ("</s>", "'</s>'")])
def test_an_end_token_that_is_not_in_the_vocabulary(folder: Path, eos: object, said: str) -> None:
    told = rf"eos_token_id in (generation_)?config\.json is {said}, and the model's 128 tokens are 0 to 127: .* give"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ModelLoadError, match=told):
        load(folder)


def test_the_last_token_may_be_the_end(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 127}))
    assert load(folder).eos_token_ids == [127]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"rope_parameters": {"rope_type": "bent", "rope_theta": 1e4}},
            r"config\.json's rope_type is 'bent', which tr",
        ),
        (
            {"hidden_act": "snake"},
            r"config\.json's hidden_act is 'snake', which transformers .* correct it, or install",
        ),
        ({"num_attention_heads": 3}, r"64\) is not a multiple of the number of attention heads \(3\)"),
        ({"vocab_size": "128"}, r"'vocab_size' expected int, got str \(value: '128'\)"),
    ],
)
def test_a_field_that_transformers_cannot_take_is_named(folder: Path, fields: dict[str, Any], told: str) -> None:
    edit_config(folder, **fields)
    with pytest.raises(ModelLoadError, match=told):
        load(folder)


def test_a_model_with_custom_code_is_refused_with_the_remedy(folder: Path) -> None:
    """No custom code runs before the operator allows it."""
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit_config(folder, model_type="own_model", architectures=["OwnForCausalLM"], auto_map=code)
    (folder / "configuration_own.py").write_text("raise SystemExit('run')\n")
    told = r"code of its own \(configuration_own\.py, modeling_own\.py; auto_map in config\.json\).*--trust-remote-code"
    with pytest.raises(ModelLoadError, match=told):
        load(folder)


def test_a_slow_tokenizer_is_converted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    converted = load(folder).folder
    assert converted != folder
    assert (converted / "tokenizer.json").is_file()


def test_mask_rules_are_classified() -> None:
    cpu = torch.device("cpu")
    assert _classify(lambda b, h, q, k: k <= q, 100, cpu) == (None, False)
    assert _classify(lambda b, h, q, k: (k <= q) & (k > q - 7), 100, cpu) == (7, False)
    assert _classify(lambda b, h, q, k: (k <= q) & (k > q - 100), 100, cpu) == (None, False)
    assert _classify(lambda b, h, q, k: (k <= q) & (k // 8 == q // 8), 100, cpu) == (None, True)
    assert _classify(lambda b, h, q, k: k >= 0 * q, 100, cpu) == (None, True)
