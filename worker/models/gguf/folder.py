"""A GGUF file as a model folder: the files besides weights in transformers' format, written once into a cache."""

from __future__ import annotations

import hashlib
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from ....shared.errors import ModelLoadError
from .architectures import find_family
from .container import open_gguf
from .embedders import pooling_files
from .parts import parts_of
from .tokenizer import GgufTokenizer

# Version of the written files; a newer release does not use those of an older one.
_VERSION = 2

log = structlog.get_logger(__name__)


def gguf_folder(path: Path, cache: Path) -> Path:
    """Return a folder with ``config.json`` and ``tokenizer.json`` of the model in ``path``; the weights stay there.

    Args:
        cache: parent of the folder, whose name follows from the file.

    Raises:
        ModelLoadError: the file is not supported, or the cache is not writable.
    """
    # Links are not followed: the hub's cache links to files whose names do not show that a model is split.
    path = path.absolute()
    states = [(str(part), part.stat()) for part in parts_of(path)]
    identity = repr([(name, state.st_size, state.st_mtime_ns) for name, state in states] + [_VERSION])
    target = cache / "gguf" / hashlib.sha256(identity.encode()).hexdigest()[:16]
    if target.is_dir():
        return target
    file = open_gguf(path)
    tokenizer = GgufTokenizer(file)
    family = find_family(file)
    config = {**family.config(), "quantization_config": {"quant_method": "gguf", "file": str(path)}}
    contents: dict[str, Any] = {
        "config.json": config,
        "tokenizer_config.json": tokenizer.config(),
        "generation_config.json": {"eos_token_id": tokenizer.end_token_ids()},
        **pooling_files(family),
    }
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.parent))
        for name, content in contents.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_text(json.dumps(content, indent=2) + "\n")
        tokenizer.tokenizer.save(str(temporary / "tokenizer.json"), pretty=False)
        # Another engine of this host may have been faster; the content is the same.
        with suppress(FileExistsError):
            temporary.rename(target)
    except OSError as error:
        raise ModelLoadError(
            f"the tokenizer of {path} cannot be written to {target.parent}: {error.strerror or error}; set "
            "XDG_CACHE_HOME to a folder that can be written to"
        ) from error
    log.info("gguf_described", source=str(path), target=str(target))
    return target
