"""The files of a GGUF model. Needs no numpy, so that `worker start` can check them at once."""

from __future__ import annotations

import re
from pathlib import Path

from ....shared.errors import ModelLoadError

MAGIC = b"GGUF"
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def check_beginning(path: Path) -> None:
    """Check that all parts of ``path`` exist, and that each starts as a GGUF file does.

    Raises:
        ModelLoadError: a file is missing, unreadable, or not GGUF.
    """
    for part in parts_of(path):
        try:
            with part.open("rb") as file:
                magic = file.read(len(MAGIC))
        except OSError as error:
            raise unreadable(part, error) from error
        check_magic(part, magic)


def parts_of(path: Path) -> list[Path]:
    """Return the files of the model in ``path``: more than one if it is split.

    Raises:
        ModelLoadError: it is not the first part, or others are missing.
    """
    shard = _SHARD.search(path.name)
    if shard is None:
        return [path]
    stem, count = path.name[: shard.start()], int(shard[2])
    if int(shard[1]) != 1:
        raise ModelLoadError(
            f"{path} is part {int(shard[1])} of {count}; give the first, {stem}-00001-of-{shard[2]}.gguf"
        )
    parts = [path.with_name(f"{stem}-{number:05}-of-{shard[2]}.gguf") for number in range(1, count + 1)]
    absent = [part.name for part in parts if not part.is_file()]
    if absent:
        raise ModelLoadError(f"{path} continues in {', '.join(absent[:4])}, which its folder lacks; fetch all parts")
    return parts


def check_magic(path: Path, magic: bytes) -> None:
    """Raise ``ModelLoadError`` if ``magic`` is not the beginning of a GGUF file."""
    if not magic:
        raise ModelLoadError(f"{path} is empty; fetch it again")
    if magic != MAGIC:
        raise ModelLoadError(f"{path} is not a GGUF file: it starts with {magic!r}; download it again")


def unreadable(path: Path, error: OSError) -> ModelLoadError:
    """Return the error for a file that cannot be read."""
    return ModelLoadError(f"{path} cannot be read: {error.strerror or error}; let the worker's user read it")
