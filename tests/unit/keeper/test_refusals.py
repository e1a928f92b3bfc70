"""Several models that cannot share a device: ``worker start`` says why before it starts a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.worker import cli as worker_cli

from ...conftest import DEMO_MODEL

NOWHERE = ("--redis-url", "unix:///nowhere.sock", "--device", "cpu")
DEMO = str(DEMO_MODEL)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--engines", "2"], "--engines 2 is for one model; several models have one engine each"),
        (["--standby"], "--standby is for one model; leave it out"),
        (["--ray", "auto"], "--ray is for one model; start a fleet for each"),
        (["--tensor-parallel-size", "2"], "tensor_parallel_size 2 of model: a model beside others has one rank"),
        (["--data-parallel-size", "2"], "data_parallel_size 2 of model: a model beside others has one rank"),
        ([], f"2 models are called model: {DEMO} and {DEMO}; give them names with served_model_name in a --models"),
    ],
)
def test_options_that_several_models_do_not_support(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert worker_cli.main(["start", "--model", DEMO, "--model", DEMO, *NOWHERE, *words]) in (1, 2)
    assert sentence in capsys.readouterr().err


def test_pinned_models_that_do_not_fit_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "models.toml"
    tables = [f'[[models]]\nmodel = "{DEMO}"\nserved_model_name = "{name}"\npinned = true\n' for name in "ab"]
    file.write_text("\n".join(tables))
    assert worker_cli.main(["start", "--models", str(file), *NOWHERE, "--device-memory", "200MiB"]) == 1
    words = "pinned models do not fit together: a (133 MiB) and b (133 MiB) need 267 MiB, device_memory is 200 MiB"
    assert words in capsys.readouterr().err


def test_models_of_which_none_can_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    words = ["start", "--model", DEMO, "--model", str(tmp_path / "empty"), *NOWHERE, "--device-memory", "100MiB"]
    assert worker_cli.main(words) == 1
    error = capsys.readouterr().err
    assert "model: model does not fit: its weights have 5 MiB" in error
    assert f"empty: model folder {tmp_path / 'empty'} lacks config.json" in error
