"""The file for the stored structure of a model. Needs no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ....shared.values.cache_folder import cache_folder
from ...config.engine_config import EngineConfig
from ..formats.declared import CONFIG_FILE, SUFFIX
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


def stored_path(config: EngineConfig, folder: Path) -> Path | None:
    """Return the file for the structure of the model in ``folder``, a model folder or a GGUF file.

    Its name depends on the files of the model, and on the options of ``config``. None for an engine that stores
    nothing: on a GPU, on several ranks, with random weights, or with weights in four bits, which are chosen by inputs
    of all layers before. None also if a file is missing.
    """
    if config.has_four_bit_weights:
        return None
    if config.device != "cpu" or config.num_ranks > 1 or config.is_grouped or not config.needs_weights:
        return None
    options = {name: getattr(config, name) for name in _OPTIONS}
    try:
        states = [(str(path), *_state_of(path)) for path in _files_of(folder)]
    except FileNotFoundError:
        return None
    digest = hashlib.sha256(repr((options, states)).encode()).hexdigest()
    return cache_folder() / "decoders" / f"{digest[:24]}.msgpack"


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
