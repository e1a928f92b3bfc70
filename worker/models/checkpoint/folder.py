"""Find the folder of a model: a local one, or a snapshot from the model hub."""

from __future__ import annotations

import json
import os
from pathlib import Path

import structlog

from ....shared.deployment.pretrained import PRETRAINED
from ....shared.errors import ModelLoadError
from ....shared.values.cache_folder import cache_folder
from ....shared.values.shown import shown
from ..formats.declared import CONFIG_FILE, SUFFIX, declared_quantization
from ..gguf.parts import check_beginning

TOKENIZER_FILE = "tokenizer.json"
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
SLOW_TOKENIZER_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
)

log = structlog.get_logger(__name__)


def resolve_model_folder(model: str, *, needs_weights: bool = True) -> Path:
    """Return the local folder of ``model``: itself, one created from a GGUF file, or a download if it is a name.

    Args:
        needs_weights: False if weights are not read (``load_format`` "dummy").

    Raises:
        ModelLoadError: the folder does not exist or lacks a file, its quantization is not supported, or the hub has no
            such model.
    """
    path = check_local_model(model, needs_weights=needs_weights)
    if path is not None and path.is_dir():
        return path
    if path is None and model in PRETRAINED:
        log.info("model_download", model=model)
        path = PRETRAINED[model].fetch()
    elif path is None:
        from .hub import fetch_model

        log.info("model_download", model=model)
        path = fetch_model(model)
    folder = path
    if not path.is_dir():
        from ..gguf.folder import gguf_folder

        folder = gguf_folder(path, cache_folder())
    _check_folder(folder, needs_weights=needs_weights)
    return folder


def check_local_model(model: str, *, needs_weights: bool = True) -> Path | None:
    """Return the folder or GGUF file that ``model`` names on this host, or None if it is a name to download.

    It downloads nothing and imports no torch, so that `worker start` rejects a wrong path before it starts a process.

    Args:
        needs_weights: as for ``resolve_model_folder``.

    Raises:
        ModelLoadError: ``model`` is a path that does not exist, or lacks a file, or has weights whose quantization is
            not supported.
    """
    path = Path(os.path.expanduser(model))  # unlike pathlib's, it leaves the home of an unknown user unchanged
    # Unlike those of pathlib, these functions do not raise if a name is too long or a folder is not accessible.
    if os.path.isdir(path):
        folder = path.resolve()
        _check_folder(folder, needs_weights=needs_weights)
        return folder
    if os.path.exists(path):
        if path.suffix != SUFFIX:
            raise ModelLoadError(
                f"model {shown(model)} is a file; give the folder that holds {CONFIG_FILE}, or a {SUFFIX} file"
            )
        check_beginning(path)
        return path
    if _looks_like_path(model):
        kind = "file" if model.endswith(SUFFIX) else "folder"
        raise ModelLoadError(
            f"model {kind} {shown(model)} does not exist; give a folder that holds {CONFIG_FILE}, a {SUFFIX} file, or "
            "a name on the model hub such as Qwen/Qwen3-0.6B"
        )
    return None


def _check_folder(folder: Path, *, needs_weights: bool) -> None:
    """Raise ``ModelLoadError`` as ``check_local_model`` does for a folder."""
    try:
        has_config = CONFIG_FILE in os.listdir(folder)
    except OSError as error:
        raise ModelLoadError(
            f"model folder {folder} cannot be read: {error.strerror or error}; let the worker's user read it"
        ) from error
    if not has_config:
        gguf_files = sorted(folder.glob(f"*{SUFFIX}"))
        remedy = f"give one of its {SUFFIX} files: {gguf_files[0]}" if gguf_files else "give the folder that holds it"
        raise ModelLoadError(f"model folder {folder} lacks {CONFIG_FILE}; {remedy}")
    _check_config_file(folder / CONFIG_FILE)
    # Its readers search for their files themselves.
    is_quantized = needs_weights and declared_quantization(folder) is not None
    if needs_weights and not is_quantized and not any((folder / name).is_file() for name in WEIGHT_FILES):
        raise ModelLoadError(
            f"model folder {folder} lacks weights: none of {', '.join(WEIGHT_FILES)}; fetch the model again"
        )
    if not any((folder / name).is_file() for name in (TOKENIZER_FILE, *SLOW_TOKENIZER_FILES)):
        raise ModelLoadError(f"model folder {folder} lacks a tokenizer: {TOKENIZER_FILE}; fetch the model again")


def _check_config_file(path: Path) -> None:
    try:
        is_object = isinstance(json.loads(path.read_bytes()), dict)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}; correct it, or fetch the model again") from error
    if not is_object:
        raise ModelLoadError(f"{path} is no JSON object; correct it, or fetch the model again")


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.endswith(("/", SUFFIX)) or model.count("/") > 1 or not model
