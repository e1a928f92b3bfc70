"""Finds the folder of a model: a local one, or a snapshot from the model hub."""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from ...shared.errors import ModelLoadError
from .formats.declared import COMPANION_FILES, declared_quantization

CONFIG_FILE = "config.json"
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
SUFFIX = ".gguf"
_DOWNLOADED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]

log = structlog.get_logger(__name__)


def resolve_model_folder(model: str, *, needs_weights: bool = True) -> Path:
    """Return the local folder of ``model``: itself, one made of a GGUF file, or a download if it is a hub name.

    Args:
        needs_weights: False where they are not read (``load_format`` "dummy").

    Raises:
        ModelLoadError: the folder does not exist or lacks a file, its weights are quantised in a way that is not read,
            or the hub has no such model for us.
    """
    path = Path(os.path.expanduser(model))  # unlike pathlib's, it leaves the home of an unknown user as it is
    if path.is_dir():
        folder = path.resolve()
    elif path.suffix == SUFFIX and path.is_file():
        from .gguf.folder import gguf_folder

        folder = gguf_folder(path, cache_folder())
    elif path.exists():
        raise ModelLoadError(f"model {model!r} is a file; give the folder that holds {CONFIG_FILE}, or a {SUFFIX} file")
    elif _looks_like_path(model):
        raise ModelLoadError(f"model folder {model!r} does not exist")
    else:
        folder = _download(model)
    if not (folder / CONFIG_FILE).is_file():
        held = sorted(folder.glob(f"*{SUFFIX}"))
        instead = f"; give one of its {SUFFIX} files: {held[0]}" if held else ""
        raise ModelLoadError(f"model folder {folder} lacks {CONFIG_FILE}{instead}")
    # Its readers look for their files by themselves.
    is_quantized = needs_weights and declared_quantization(folder) is not None
    if needs_weights and not is_quantized and not any((folder / name).is_file() for name in WEIGHT_FILES):
        raise ModelLoadError(f"model folder {folder} lacks weights: none of {', '.join(WEIGHT_FILES)}")
    if not any((folder / name).is_file() for name in (TOKENIZER_FILE, *SLOW_TOKENIZER_FILES)):
        raise ModelLoadError(f"model folder {folder} lacks a tokenizer: {TOKENIZER_FILE}")
    return folder


def cache_folder() -> Path:
    """Where what is made of models is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "penstock"


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.endswith("/") or model.count("/") > 1 or not model


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download

    log.info("model_download", model=model)
    try:
        # First what may say that the rest is of no use here.
        declared_quantization(Path(snapshot_download(model, allow_patterns=[CONFIG_FILE, *COMPANION_FILES])))
        return Path(snapshot_download(model, allow_patterns=_DOWNLOADED))
    except ModelLoadError:
        raise
    except Exception as error:  # the hub raises its own, requests' and OSError
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelLoadError(
            f"model {model!r} is no local folder and cannot be had from the model hub: {reason[0]}"
        ) from error
