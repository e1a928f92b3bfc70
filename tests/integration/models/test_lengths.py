"""Models that compute differently beyond some length give transformers' tokens there, or are refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel

from penstock.ops.lab.survey import trial
from penstock.ops.lab.survey.outcome import SAME
from penstock.ops.lab.survey.small_config import small_config
from penstock.shared.errors import ConfigurationError, ModelLoadError
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.models.checks.lengths import LoweredReference, lowered
from penstock.worker.models.forward import ForwardSettings
from penstock.worker.models.loading import candidates
from penstock.worker.models.loading.loader import load_model, load_module
from penstock.worker.models.modes.packed import PackedForward
from penstock.worker.models.modes.packed_with_past import PackedWithPast

from .conftest import NUM_NEW_TOKENS

# Shorter than half of the survey's prompts, which have 1 to 40 tokens.
LENGTH = 16


def config_of(model_type: str, **rope: Any) -> PretrainedConfig:
    """A small configuration whose lengths are ``LENGTH``, and strong beyond it."""
    config = small_config(model_type)
    text = config.get_text_config()
    lengths = ("floor_scale", "keep_window_size", "log_scaling_n_floor")
    for field, value in {**dict.fromkeys(lengths, LENGTH), "attn_scale": 1.0, "log_scaling_alpha": 1.0}.items():
        if hasattr(text, field):
            setattr(text, field, value)
    if rope:
        text.rope_parameters |= rope
    return config


@pytest.mark.parametrize(
    ("model_type", "rope"),
    [
        ("llama4_text", {}),
        ("llama4", {}),
        ("inkling2_text", {}),
        ("ministral3", {"original_max_position_embeddings": LENGTH, "llama_4_scaling_beta": 1.0}),
    ],
)
def test_prompts_beyond_the_length_get_transformers_tokens(
    model_type: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    """Alone, several packed, in chunks, and computed again; decodes cross the length, too."""
    expectation = trial.find_model(config_of(model_type, **rope), tmp_path, NUM_NEW_TOKENS)
    model = trial.load(tmp_path)
    run = partial(trial.run_engine, model=model)
    told = trial.compare(tmp_path, expectation, model.forward, run)
    assert told == dict.fromkeys(told, SAME)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_finds_out_that_llama4_counts_positions_itself(dtype: str, tmp_path: Path) -> None:
    """Rounding in 16 bits does not hide it, though 0.1 is the strength in real models."""
    config = small_config("llama4_text")
    config.floor_scale = LENGTH
    trial.write_model(config, tmp_path)
    load = partial(EngineConfig, model=str(tmp_path), dtype=dtype)
    assert type(load_model(load(max_model_len=64), tmp_path).forward) is PackedWithPast
    # No request gets so far.
    assert type(load_model(load(max_model_len=LENGTH - 1), tmp_path).forward) is PackedForward


def test_yarn_is_served_up_to_the_length_that_it_stretches_to(tmp_path: Path) -> None:
    """Qwen's README keeps the unscaled length in the configuration and adds the factor."""
    config = small_config("qwen3")
    config.max_position_embeddings = LENGTH + 4
    config.rope_parameters |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH}
    expectation = trial.find_model(config, tmp_path, NUM_NEW_TOKENS)
    model = trial.load(tmp_path)
    assert model.max_model_len == 4 * LENGTH
    assert load_model(EngineConfig(model=str(tmp_path), max_model_len=4 * LENGTH), tmp_path).max_model_len == 4 * LENGTH
    told = trial.compare(tmp_path, expectation, model.forward, partial(trial.run_engine, model=model))
    assert told == dict.fromkeys(told, SAME)
    with pytest.raises(ConfigurationError, match=f"at most {4 * LENGTH} .* 'yarn' stretches max_position_embeddings"):
        load_model(EngineConfig(model=str(tmp_path), max_model_len=4 * LENGTH + 1), tmp_path)


def test_lengths_are_restored(tmp_path: Path) -> None:
    trial.write_model(config_of("llama4_text"), tmp_path)
    module = load_module(EngineConfig(model=str(tmp_path)), tmp_path)
    before = _numbers(module)
    with lowered(module):
        assert _numbers(module) != before
    assert _numbers(module) == before
    settings = ForwardSettings(max_model_len=64)
    with torch.inference_mode():
        truth = LoweredReference.of(module, trial.VOCAB_SIZE, settings)
        assert truth is not None
        assert truth.longest == module.config.attention_chunk_size == 8
        truth.check(PackedWithPast(module, settings))
    assert _numbers(module) == before


def test_model_without_a_right_way_is_refused_with_the_length_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("llama4_text")
    config.attention_chunk_size = 64
    trial.write_model(config, tmp_path)
    others = tuple(one for one in candidates.CANDIDATES if one.build is not PackedWithPast and one.mode != "gather")
    monkeypatch.setattr(candidates, "CANDIDATES", others)
    with pytest.raises(ModelLoadError, match=f"max_model_len {LENGTH - 1} or less"):
        trial.load(tmp_path)


def test_doge_is_served_up_to_the_keys_that_it_keeps(tmp_path: Path) -> None:
    """Beyond it chooses keys by scores that are often equal: then transformers itself gives several answers."""
    trial.write_model(config_of("doge"), tmp_path)
    assert load_model(EngineConfig(model=str(tmp_path)), tmp_path).max_model_len == LENGTH
    with pytest.raises(ConfigurationError, match=f"keep_window_size.*give {LENGTH} or less"):
        load_model(EngineConfig(model=str(tmp_path), max_model_len=LENGTH + 1), tmp_path)


def _numbers(module: PreTrainedModel) -> list[Any]:
    config = module.config
    names = ("floor_scale", "attn_scale")
    return [
        *((part.floor_scale, part.attn_scale) for part in module.modules() if "floor_scale" in vars(part)),
        *(getattr(config, name) for name in (*names, "attention_chunk_size")),
    ]
