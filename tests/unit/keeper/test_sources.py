"""Which models a worker serves on its devices, and their options."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.shared.process.command_line import Parser, UsageError
from penstock.shared.swap.views import SleepLevel
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.swap import SharingOptions
from penstock.worker.keeper.sources import SharedSettings, read_entries
from penstock.worker.options.settings import read_settings
from penstock.worker.programs import PROGRAMS, START

FILE = """
max_swap_share = 0.1
patience = { interactive = 3, standard = 7 }
[defaults]
max_num_seqs = 8
block_size = 32
[[models]]
model = "/m/a"
pinned = true
[[models]]
model = "/m/b.gguf"
served_model_name = "bee"
sleep_level = 1
max_num_seqs = 4
min_awake = 10
patience = { interactive = 2 }
"""


def read(*words: str) -> SharedSettings | None:
    parser = Parser()
    START.add_arguments(parser)
    arguments = parser.parse_args(words)
    return read_entries(read_settings(START, PROGRAMS, arguments, {}), arguments.model or [])


def shared(*words: str) -> SharedSettings:
    settings = read(*words)
    assert settings is not None
    return settings


def models_of(settings: SharedSettings) -> list[tuple[str, int]]:
    engines = [EngineConfig(**{**entry.settings.fields_of(EngineConfig), "device": "cpu"}) for entry in settings.models]
    return [(engine.model_name, engine.max_num_seqs) for engine in engines]


def test_one_model_is_always_awake() -> None:
    assert read("--model", "/m/a") is None
    with pytest.raises(UsageError, match=r"--idle-sleep is for several models; give more of them, or name this one"):
        read("--model", "/m/a", "--idle-sleep", "5")


def test_several_models_have_the_options_of_the_command_line() -> None:
    settings = shared("--model", "/m/a", "--model", "/m/b", "--max-num-seqs", "3", "--max-wait", "batch=5")
    assert models_of(settings) == [("a", 3), ("b", 3)]
    options = settings.settings.make(SharingOptions).swap_options
    assert (options.max_wait_of("batch"), options.max_wait_of("standard")) == (5.0, 60.0)


def test_models_of_a_file_have_their_own_options(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(FILE)
    settings = shared("--models", str(file))
    assert models_of(settings) == [("a", 8), ("bee", 4)]
    assert [(entry.is_pinned, entry.sleep_level) for entry in settings.models] == [
        (True, None),
        (False, SleepLevel.HOST_MEMORY),
    ]
    assert settings.settings.make(SharingOptions).max_swap_share == 0.1
    options = [entry.settings.make(SharingOptions).swap_options for entry in settings.models]
    assert [(each.max_share, each.min_awake_s, each.patience_s) for each in options] == [
        (0.1, 0.0, {"interactive": 3.0, "standard": 7.0}),
        (0.1, 10.0, {"interactive": 2.0, "standard": 7.0}),
    ]
    # The command line overrides defaults, but not what the file says about one model.
    settings = shared("--models", str(file), "--max-num-seqs", "16", "--max-swap-share", "0.3")
    assert models_of(settings) == [("a", 16), ("bee", 4)]
    assert settings.settings.make(SharingOptions).max_swap_share == 0.3


def test_a_folder_of_models(tmp_path: Path) -> None:
    for name in ("one/config.json", "two.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "notes/readme"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    settings = shared("--models-folder", str(tmp_path))
    assert [name for name, _ in models_of(settings)] == ["big-00001-of-00002.gguf", "one", "two.gguf"]
    with pytest.raises(UsageError, match=r"has no folder with config.json and no .gguf file"):
        read("--models-folder", str(tmp_path / "notes"))
    with pytest.raises(UsageError, match="--model and --models-folder contradict each other"):
        read("--models-folder", str(tmp_path), "--model", "/m/a")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("models = 3", "must have a table [[models]] for each model"),
        ("[[models]]\nmodel = 'a'\nspeed = 1", "speed in models[0] of {} is no option of a model"),
        ("[[models]]\npinned = true", "model is missing in models[0] of {}"),
        ("[[models]]\nmodel = 'a'\npinned = 1", "pinned in models[0] of {} must be true or false, got 1"),
        ("[[models]]\nmodel = 'a'\nsleep_level = 3", "sleep_level in models[0] of {} must be 0, 1, 2 or"),
        ("[[models]]\nmodel = 'a'\nmax_num_seqs = 0", "max_num_seqs in models[0] of {} must be at least 1, got 0"),
        ("[[models]]\nmodel = 'a'\npatience = 2", "patience in models[0] of {} must be a table of seconds by band"),
        ("max_num_seqs = 3\n[[models]]\nmodel = 'a'", "max_num_seqs in {} is no option of a model"),
        ("[[models]\n", "is not a TOML file"),
    ],
)
def test_a_mistake_in_a_file_of_models(content: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(content)
    with pytest.raises(UsageError) as caught:
        read("--models", str(file))
    assert sentence.format(file) in str(caught.value)
