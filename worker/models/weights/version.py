"""A short name for the weights in a folder, the same on every host that has the same files.

A checkpoint of gigabytes is not read for it: of each tensor some bytes in its middle count, beside all names, types and
shapes. So it tells checkpoints apart, which differ everywhere, and proves nothing. Who changes single rows gives them a
name of his own.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ....shared.errors import ModelLoadError
from .safetensors_files import tensors_of

_SAMPLE_BYTES = 4096
_DIGITS = 12
# What else weights come in.
_OTHER_SUFFIXES = (".bin", ".gguf", ".pt", ".pth")


def weights_version(folder: Path) -> str:
    """Raises ``ModelLoadError`` if a file cannot be read."""
    whole = hashlib.sha256()
    try:
        for tensor in sorted(tensors_of(folder), key=lambda tensor: tensor.name):
            whole.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
            whole.update(_sample(tensor.file, tensor.start, tensor.end))
        for file in sorted(folder.iterdir()):
            if file.suffix in _OTHER_SUFFIXES:
                size = file.stat().st_size
                whole.update(f"{file.name} {size}\n".encode())
                for part in range(8):
                    whole.update(_sample(file, size * part // 8, size * (part + 1) // 8))
    except OSError as error:
        raise ModelLoadError(f"the weights in {folder} cannot be read: {error}") from error
    return whole.hexdigest()[:_DIGITS]


def _sample(file: Path, start: int, end: int) -> bytes:
    size = min(_SAMPLE_BYTES, end - start)
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, size, start + (end - start - size) // 2)
    finally:
        os.close(descriptor)
