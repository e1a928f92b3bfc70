"""A folder's quantised weights are understood or refused by name, without torch and before any is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.errors import ModelLoadError
from penstock.worker.models.checkpoint.folder import resolve_model_folder
from penstock.worker.models.formats.declared import declared_quantization, has_integers

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}


def folder_of(tmp_path: Path, settings: Any = None, file: str = "config.json", **fields: Any) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps({"quantization_config": settings, **fields} if settings else fields))
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "by bitsandbytes"),
        ({"load_in_8bit": True}, "by bitsandbytes"),
        ({"quant_method": "eetq"}, "by EETQ"),
        ({"quant_method": "hqq"}, "by HQQ"),
        ({"quant_method": "aqlm"}, "by AQLM"),
        ({"quant_method": "exl2"}, r"by ExLlamaV2 \(exl2\)"),
        ({"quant_method": "torchao"}, "by 'torchao'"),
        ({"quant_method": "fp_quant"}, "by FP-Quant"),
        ({"bits": 4}, "by 'None'"),
        ({**GPTQ, "bits": 3}, "by gptq with bits 3 .*but 2 or 4 or 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format True"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"by fp8 with weight_block_size \[0, 128\]"),
        ({"quant_method": "awq", "version": "gemv"}, "by awq with version 'gemv'"),
        ({**COMPRESSED, "format": "marlin-24"}, "by compressed-tensors with format 'marlin-24'"),
        ({**COMPRESSED, "config_groups": {"a": {"format": "mxfp6-pack-quantized"}}}, "with format 'pack-quantized'"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparsity_config"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"R1": {}}}}, "with transform_config"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "by modelopt with quant_algo 'NVFP4'"),
    ],
)
def test_unreadable_formats_are_named_with_a_remedy(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        resolve_model_folder(str(folder_of(tmp_path, settings)))
    assert "Penstock reads fp8" in str(caught.value)
    assert str(caught.value).endswith("--quantization int8")
    # Weights that are not read may be in any form.
    with pytest.raises(ModelLoadError, match=r"lacks a tokenizer"):
        resolve_model_folder(str(tmp_path), needs_weights=False)


def test_invalid_settings_are_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, quantization_config="int4")
    with pytest.raises(ModelLoadError, match="has quantization_config 'int4', which is no object of settings"):
        declared_quantization(folder)


@pytest.mark.parametrize(
    ("settings", "file", "method"),
    [
        ({"quantization_config": {"quant_method": "fbgemm_fp8"}}, "config.json", "fp8"),
        ({"text_config": {"quantization_config": GPTQ}}, "config.json", "gptq"),
        ({"compression_config": {"config_groups": {}, "format": "dense"}}, "config.json", "compressed-tensors"),
        ({"quantization": {"quant_algo": "FP8"}}, "hf_quant_config.json", "modelopt"),
        ({"bits": 8, "group_size": -1}, "quantize_config.json", "gptq"),
        ({"w_bit": 4, "q_group_size": 128, "version": "GEMM"}, "quant_config.json", "awq"),
    ],
)
def test_sources_of_the_declaration(tmp_path: Path, settings: dict[str, Any], file: str, method: str) -> None:
    result = declared_quantization(folder_of(tmp_path, file=file, **settings))
    assert result is not None
    assert (result.method, result.source) == (method, file)


def test_a_plain_model_declares_nothing(tmp_path: Path) -> None:
    assert declared_quantization(folder_of(tmp_path, quantization_config=None)) is None


def test_a_folder_of_gguf_files_asks_for_one_of_them(tmp_path: Path) -> None:
    (tmp_path / "a-Q4_K_M.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"lacks config\.json; give one of its \.gguf files: .*a-Q4_K_M\.gguf"):
        resolve_model_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "expected"), [(GPTQ, True), (COMPRESSED, True), ({"quant_method": "fp8"}, False), (None, False)]
)
def test_formats_of_integers_are_known_before_a_load(tmp_path: Path, settings: Any, *, expected: bool) -> None:
    assert has_integers(folder_of(tmp_path, settings)) is expected


def test_a_gguf_file_may_have_integers(tmp_path: Path) -> None:
    assert has_integers(tmp_path / "model.gguf")
    assert not has_integers(tmp_path / "model")
