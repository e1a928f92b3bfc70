"""The fields of a PEFT configuration that are read, and those that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.errors import AdapterFileError, UnsupportedAdapterError
from penstock.shared.lora.peft_config import read_peft_config

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"]}


def write(folder: Path, **fields: Any) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | fields))
    return folder


def test_configs_written_by_peft_are_read(tmp_path: Path) -> None:
    config = read_peft_config(
        write(
            tmp_path,
            base_model_name_or_path="some/base",
            rank_pattern={"layers.0.self_attn.q_proj": 16},
            use_rslora=True,
            bias="none",
            use_dora=False,
            modules_to_save=None,
            layer_replication=None,
        )
    )
    assert (config.rank, config.largest_rank, config.target_modules) == (8, 16, ("q_proj", "v_proj"))
    assert config.rank_of("model.layers.0.self_attn.q_proj") == 16
    assert config.scale_of("model.layers.1.self_attn.q_proj") == 16 / 8**0.5
    assert config.base_model_name == "some/base"


def test_a_pattern_is_kept_unchanged(tmp_path: Path) -> None:
    assert read_peft_config(write(tmp_path, target_modules=".*_proj")).target_modules == (".*_proj",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type of .* must be 'LORA', got 'IA3'"),
        ({"use_dora": True}, "use_dora=True of .* is not served: DoRA is not computed"),
        ({"bias": "all"}, "bias='all' of .* is not served"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] of .* is not served"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters=.* is not served"),
        ({"target_modules": ["q_proj", "model.embed_tokens"]}, "target_modules of .* has 'model.embed_tokens'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True of .* is not served"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora=.* is not served: .*BD-LoRA"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config=.* is not served: .*Arrow"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices=.* is not served"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication=.* is not served"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens=.* is not served"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' of .* is not served.*path_initial_model"),
        ({"target_modules": "("}, r"target_modules of .* has '\(', which is no regular expression"),
        ({"alpha_pattern": {"(": 4}}, r"alpha_pattern of .* has '\(', which is no regular expression"),
        ({"target_modules": "a{99999999999999999999}"}, "which is no regular expression: the repetition number"),
        ({"rank_pattern": {"a{99999999999999999999}": 4}}, "rank_pattern of .* is no regular expression"),
        ({"kasa_config": {"beta": 0.1}}, "kasa_config=.* is not served: .*KaSA"),
        ({"monteclora_config": {}}, "monteclora_config=.* is not served: .*MonteCLoRA"),
        ({"lora_alpha": None}, "lora_alpha of .* must be a finite number, got None"),
        ({"r": 0}, "r of .* must be an integer of at least 1, got 0"),
        ({"r": True}, "r of .* must be an integer"),
        ({"rank_pattern": {"q_proj": "4"}}, r"rank_pattern\['q_proj'\] of .* must be an integer"),
        ({"rank_pattern": [4]}, "rank_pattern of .* must be an object"),
        ({"target_modules": []}, "target_modules of .* must be names of layers"),
        ({"target_modules": None}, "target_modules of .* must be names of layers"),
    ],
)
def test_unsupported_adapters_are_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedAdapterError, match=message):
        read_peft_config(write(tmp_path, **fields))


def test_a_file_that_does_not_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterFileError, match=r"adapter_config\.json cannot be read"):
        read_peft_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterFileError, match=r"adapter_config\.json is not JSON"):
        read_peft_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(AdapterFileError, match="is nested too deep"):
        read_peft_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterFileError, match="must hold a JSON object"):
        read_peft_config(tmp_path)
