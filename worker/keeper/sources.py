"""Which models a worker serves on its devices: several ``--model``, a file of models, or a folder of models."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...shared.process.command_line import UsageError
from ...shared.swap.views import SleepLevel
from ...shared.values.shown import shown
from ..config.engine_config import EngineConfig
from ..config.model import MODEL
from ..config.swap import SharingOptions
from ..config.worker_config import WorkerConfig
from ..models.formats.declared import CONFIG_FILE, SUFFIX
from ..options.settings import Settings

# Values of sleep_level in a file of models.
_LEVELS = {0: SleepLevel.DISK, 1: SleepLevel.HOST_MEMORY, 2: SleepLevel.PROCESS}
# Options of the device that each of its models may have, too.
_OF_A_MODEL = {"min_awake", "patience"}
# Parts of a split GGUF file after the first, which names the model.
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True)
class ModelEntry:
    """A model with its options.

    Args:
        settings: all options, with those of this model.
        is_pinned: whether it never leaves its device.
        sleep_level: depth of its sleep; None to choose by the free memory.
    """

    settings: Settings
    is_pinned: bool = False
    sleep_level: SleepLevel | None = None


@dataclass(frozen=True)
class SharedSettings:
    """Options of a worker whose devices several models share, and those of its models."""

    settings: Settings
    models: Sequence[ModelEntry]


def read_entries(settings: Settings, models: Sequence[str]) -> SharedSettings | None:
    """Return the options of a worker and its models; None for a worker with one model that is always awake.

    Args:
        models: values of ``--model``.

    Raises:
        UsageError: sources contradict each other, or cannot be read; the message says which.
    """
    sharing = settings.make(SharingOptions)
    sources = [
        *(["--model"] if len(models) > 1 else []),
        *(["--models"] if sharing.models else []),
        *(["--models-folder"] if sharing.models_folder else []),
    ]
    if not sources:
        _check_not_shared(settings)
        return None
    if models and "--model" not in sources:
        sources.insert(0, "--model")
    if len(sources) > 1:
        raise UsageError(f"{' and '.join(sources)} contradict each other; give one of them")
    if sharing.models:
        return _read_file(settings, sharing.models)
    if sharing.models_folder:
        models = _models_in(Path(sharing.models_folder))
    return SharedSettings(settings, [_entry_of(settings, {"model": model}, sources[0]) for model in models])


def _check_not_shared(settings: Settings) -> None:
    for setting in settings.all:
        if setting.declared.struct is SharingOptions and setting.value != setting.declared.default:
            raise UsageError(
                f"{setting.source} is for several models; give more of them, or name this one in a --models file"
            )


def _models_in(folder: Path) -> list[str]:
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise UsageError(f"--models-folder {folder} cannot be read: {error.strerror}") from error
    models = [
        str(path)
        for path in paths
        if (path / CONFIG_FILE).is_file() or (path.suffix == SUFFIX and not _LATER_PART.search(path.name))
    ]
    if not models:
        raise UsageError(f"--models-folder {folder} has no folder with {CONFIG_FILE} and no {SUFFIX} file")
    return models


def _read_file(settings: Settings, path: str) -> SharedSettings:
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--models {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--models {path} is not a TOML file: {error}") from error
    entries, defaults = content.pop("models", None), content.pop("defaults", {})
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"--models {path} must have a table [[models]] for each model")
    if not isinstance(defaults, dict):
        raise UsageError(f"defaults in {path} must be a table of options")
    _check_keys(content, _names_of(SharingOptions, settings) - {"models", "models_folder"}, path)
    _check_keys(defaults, _names_of_model(settings), f"defaults of {path}")
    common = settings.with_table(content, path, is_default=True)
    common = common.with_table(defaults, f"defaults of {path}", is_default=True)
    models = [_entry_of(common, entry, f"models[{index}] of {path}") for index, entry in enumerate(entries)]
    return SharedSettings(common, models)


def _entry_of(settings: Settings, table: dict[str, Any], place: str) -> ModelEntry:
    values = dict(table)
    is_pinned, level = values.pop("pinned", False), values.pop("sleep_level", "auto")
    if not isinstance(is_pinned, bool):
        raise UsageError(f"pinned in {place} must be true or false, got {shown(is_pinned)}")
    if level != "auto" and (isinstance(level, bool) or level not in _LEVELS):
        raise UsageError(f'sleep_level in {place} must be 0, 1, 2 or "auto", got {shown(level)}')
    if "model" not in values:
        raise UsageError(f"model is missing in {place}; give a model folder, a .gguf file, or a name on the hub")
    _check_keys(values, _names_of_model(settings) | _OF_A_MODEL, place)
    if isinstance(values.get("patience"), dict):
        # Other bands have the patience of the device.
        values["patience"] = (settings.make(SharingOptions).patience or {}) | values["patience"]
    return ModelEntry(settings.with_table(values, place), is_pinned, None if level == "auto" else _LEVELS[level])


def _check_keys(table: dict[str, Any], names: set[str], place: str) -> None:
    for key in table:
        if key not in names:
            raise UsageError(f"{key} in {place} is no option of a model; ops/guide/serving/several_models.md has them")


def _names_of(struct: type[msgspec.Struct], settings: Settings) -> set[str]:
    return {setting.declared.name for setting in settings.all if setting.declared.struct is struct}


def _names_of_model(settings: Settings) -> set[str]:
    """Return the options that may differ between models: those of the engine, except for its device."""
    others = {
        setting.declared.name
        for setting in settings.all
        if setting.declared.struct is WorkerConfig and setting.declared.option.group == MODEL
    }
    return (_names_of(EngineConfig, settings) | others) - {"device"}
