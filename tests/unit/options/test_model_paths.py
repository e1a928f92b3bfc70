"""A model's path that cannot be served is refused by ``worker start`` itself, before a process or torch is started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.errors import ModelLoadError
from penstock.worker import cli as worker_cli
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.models.checkpoint.folder import check_local_model

# Nothing listens here: a program that continues after the check says so instead.
NOWHERE = ("--redis-url", "redis://localhost:1", "--device", "cpu")


def model_folder(folder: Path, without: str = "") -> Path:
    """Write a folder in which nothing but ``without`` is missing, and nothing is real."""
    folder.mkdir()
    for name in {"config.json", "model.safetensors", "tokenizer.json"} - {without}:
        (folder / name).write_text("{}")
    return folder


def text_file(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def folder_with_config(folder: Path, content: str) -> Path:
    text_file(model_folder(folder) / "config.json", content)
    return folder


def with_a_gguf_file(folder: Path) -> Path:
    (model_folder(folder, without="config.json") / "a-Q8_0.gguf").touch()
    return folder


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda tmp: tmp / "nope", "model folder '{}' does not exist; give a folder that holds config.json, a .gguf"),
        (lambda tmp: tmp / "nope.gguf", "model file '{}' does not exist; give a folder that holds config.json"),
        (lambda _: "nope.gguf", "model file '{}' does not exist; give a folder"),
        (lambda _: "./nope", "model folder '{}' does not exist; give a folder"),
        (lambda _: "~/no/such/folder", "model folder '{}' does not exist; give a folder"),
        (lambda _: "models/of/mine", "model folder '{}' does not exist; give a folder"),
        (lambda _: "models/", "model folder '{}' does not exist; give a folder"),
        (lambda tmp: text_file(tmp / "weights.bin", "x"), "model '{}' is a file; give the folder"),
        (
            lambda tmp: text_file(tmp / "a.gguf", "<html>"),
            "{} is not a GGUF file: it starts with b'<htm'; download it again",
        ),
        (lambda tmp: text_file(tmp / "a.gguf", ""), "{} is empty; fetch it again"),
        (lambda tmp: text_file(tmp / "a-00001-of-00002.gguf", "GGUF"), "{} continues in a-00002-of-00002.gguf, which"),
        (lambda tmp: model_folder(tmp / "m", "config.json"), "model folder {} lacks config.json; give the folder that"),
        (lambda tmp: with_a_gguf_file(tmp / "m"), "model folder {0} lacks config.json; give one of its .gguf files"),
        (lambda tmp: model_folder(tmp / "m", "model.safetensors"), "model folder {} lacks weights: none of model."),
        (lambda tmp: model_folder(tmp / "m", "tokenizer.json"), "model folder {} lacks a tokenizer: tokenizer.json"),
        (lambda tmp: folder_with_config(tmp / "m", "{"), "{}/config.json cannot be read: Expecting property name"),
        (lambda tmp: folder_with_config(tmp / "m", "[]"), "{}/config.json is no JSON object; correct it"),
        (
            lambda tmp: folder_with_config(tmp / "m", json.dumps({"quantization_config": {"quant_method": "hqq"}})),
            "the model in {} is quantised by HQQ",
        ),
    ],
)
def test_a_missing_model_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, make: Callable[[Path], Path | str], words: str
) -> None:
    model = str(make(tmp_path))
    assert worker_cli.main(["start", "--model", model, "--served-model-name", "m", *NOWHERE]) == 1
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"error: {words.format(model)}")


def test_it_is_refused_before_torch_is_imported() -> None:
    code = """
import sys
from penstock.worker import cli
status = cli.main(sys.argv[1:])
print(status, sorted({"torch", "transformers"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code, "start", "--model", "/nope", *NOWHERE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout == "1 []\n", result.stderr


def test_the_source_of_the_models_name_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_MODEL", "/nope")
    assert worker_cli.main(["start", *NOWHERE]) == 1
    assert capsys.readouterr().err.endswith(" (given: PENSTOCK_MODEL)\n")


def test_a_name_that_no_file_may_have_is_a_sentence() -> None:
    with pytest.raises(ModelLoadError, match=r"model folder '/aaa.*' does not exist"):
        check_local_model("/" + "a" * 5_000)


@pytest.mark.parametrize("model", ["gpt2", "org/model", "org/model-GGUF", "org/model.v2", "org/model-GGUF:Q4_K_M"])
def test_a_name_on_the_hub_is_left_to_the_engine(model: str) -> None:
    assert check_local_model(model) is None


def test_a_folder_in_the_working_directory_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    folder = model_folder(tmp_path / "org" / "model")
    assert check_local_model("org/model") == folder


@pytest.mark.parametrize(
    "options", [{"load_format": "dummy"}, {"engine": "vllm"}, {"engine": "http", "engine_url": "http://here:1"}]
)
def test_engines_that_read_no_weights_need_none_in_the_folder(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = model_folder(tmp_path / "m", without="model.safetensors")
    config = EngineConfig(model=str(folder), **options)
    assert check_local_model(config.model, needs_weights=config.needs_weights) == folder
