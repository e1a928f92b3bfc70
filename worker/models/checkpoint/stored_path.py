"""The files for the stored structure and the packed weights of a model. Needs no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from ....shared.values.cache_folder import cache_folder
from ...config.engine_config import EngineConfig
from ..formats.declared import CONFIG_FILE, SUFFIX, declared_quantization
from ..gguf.parts import parts_of

# Options of the engine on which the structure, the packed weights or the reference results depend.
_OPTIONS = (
    "attention_backend",
    "block_size",
    "deterministic",
    "dtype",
    "kv_cache_dtype",
    "max_images",
    "max_model_len",
    "native_kernels",
    "quantization",
    "runner",
    "trust_remote_code",
)
# Those on which packed weights depend. Weights in four bits are chosen by inputs, so they depend on all.
_PACKING_OPTIONS = ("dtype", "native_kernels", "quantization", "runner", "trust_remote_code")


def stored_path(config: EngineConfig, folder: Path) -> Path | None:
    """Return the file for the structure of the model in ``folder``, a model folder or a GGUF file.

    Its name depends on the files of the model, and on the options of ``config``. None for an engine that stores
    nothing: on a GPU, on several ranks, or with random weights. None also if a file is missing.
    """
    if config.device != "cpu" or config.num_ranks > 1 or config.is_grouped or not config.needs_weights:
        return None
    return _path(config, folder, _OPTIONS, ".msgpack")


def packed_path(config: EngineConfig, folder: Path) -> Path | None:
    """Return the file for packed weights, for engines that ``stored_path`` has a file for. Engines with other options
    may share it.

    None if the files of the model have the numbers that are packed: packing them takes no longer than reading them.
    """
    is_plain = folder.suffix != SUFFIX and declared_quantization(folder) is None
    if config.quantization is None and is_plain:
        return None
    return _path(config, folder, _OPTIONS if config.has_four_bit_weights else _PACKING_OPTIONS, ".weights")


def is_stored(config: EngineConfig, folder: Path) -> bool:
    """Return whether an engine probably loads the model without transformers."""
    paths = [stored_path(config, folder)]
    if config.has_four_bit_weights:
        paths.append(packed_path(config, folder))
    return all(path is not None and path.is_file() for path in paths)


def _path(config: EngineConfig, folder: Path, names: Sequence[str], suffix: str) -> Path | None:
    options = {name: getattr(config, name) for name in names}
    try:
        states = [(str(path), *_state_of(path)) for path in _files_of(folder)]
    except FileNotFoundError:
        return None
    digest = hashlib.sha256(repr((options, states)).encode()).hexdigest()
    return cache_folder() / "decoders" / f"{digest[:24]}{suffix}"


def _state_of(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_size, state.st_mtime_ns


def _files_of(folder: Path) -> list[Path]:
    """Return the files of the model: those of the GGUF file from which ``folder`` was created, else all of it."""
    if folder.suffix == SUFFIX:
        return parts_of(folder.absolute())
    settings = json.loads((folder / CONFIG_FILE).read_bytes()).get("quantization_config") or {}
    if settings.get("quant_method") == "gguf":
        return parts_of(Path(settings["file"]))
    return sorted(path for path in folder.iterdir() if path.is_file())
