"""What the headers of a folder's safetensors files say: which tensors, of what shape, and where in which file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from ....shared.errors import ModelLoadError

INDEX_FILE = "model.safetensors.index.json"
WHOLE_FILE = "model.safetensors"
_MAX_HEADER_BYTES = 100 << 20


class StoredTensor(NamedTuple):
    """A tensor in a file, whose bytes are from ``start`` to ``end``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


class _Header(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers would read, in order; none where there are none."""
    try:
        index = msgspec.json.decode((folder / INDEX_FILE).read_bytes(), type=_Index)
    except FileNotFoundError:
        return [folder / WHOLE_FILE] if (folder / WHOLE_FILE).is_file() else []
    except (OSError, msgspec.DecodeError) as error:
        raise ModelLoadError(f"{folder / INDEX_FILE} cannot be read: {error}") from error
    # As transformers has it: a whole file goes before an index.
    if (folder / WHOLE_FILE).is_file():
        return [folder / WHOLE_FILE]
    return [folder / name for name in sorted(set(index.weight_map.values()))]


def tensors_of(folder: Path) -> Iterator[StoredTensor]:
    """All tensors of the folder's safetensors files.

    Raises:
        ModelLoadError: a file cannot be read, or is none.
    """
    for file in weight_files(folder):
        yield from _tensors_in(file)


def _tensors_in(file: Path) -> Iterator[StoredTensor]:
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise ModelLoadError(f"{file} is no safetensors file: its header would have {size:,} bytes")
            header = msgspec.json.decode(opened.read(size), type=dict[str, msgspec.Raw])
        for name, raw in header.items():
            if name != "__metadata__":
                said = msgspec.json.decode(raw, type=_Header)
                start, end = said.data_offsets
                yield StoredTensor(name, said.dtype, said.shape, file, 8 + size + start, 8 + size + end)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
