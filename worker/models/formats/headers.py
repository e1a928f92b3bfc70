"""The headers of a folder's safetensors files: which tensors they have, without torch and before anything is loaded."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ....shared.errors import ModelLoadError
from .declared import declared_quantization

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_LENGTH = struct.Struct("<Q")
_PAIRS = {"I32": struct.Struct("<ii"), "I64": struct.Struct("<qq")}
# Limit of the format.
_MAX_HEADER_BYTES = 100_000_000


class _Entry(msgspec.Struct):
    """A tensor in the header of a file; ``__metadata__`` has none of these fields."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class StoredHeader:
    """A tensor of a file.

    Args:
        dtype: in safetensors' spelling: ``BF16``, ``F8_E4M3``, ``I32``.
        file: that has it.
        offset: of its content in the file, in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def read_pair(self) -> tuple[int, int]:
        """Return the content of a tensor of two integers.

        Raises:
            ModelLoadError: it has others, or the file is cut short.
        """
        pair = _PAIRS.get(self.dtype)
        if pair is None or self.num_elements != 2:
            raise _damaged(self.file)
        try:
            with self.file.open("rb") as file:
                file.seek(self.offset)
                rows, columns = pair.unpack(file.read(pair.size))
        except (OSError, struct.error) as error:
            raise _damaged(self.file) from error
        return rows, columns


def has_safetensors(folder: Path) -> bool:
    """Return whether the weights of a folder are read from safetensors files."""
    if declared_quantization(folder) is not None:
        return any(folder.glob("*.safetensors"))
    return (folder / _WHOLE).is_file() or (folder / _INDEX).is_file()


def weight_files(folder: Path) -> list[Path]:
    """Return the files of the index, else the only file, of any name, since GPTQ's are named after their bits.

    Raises:
        ModelLoadError: the folder has none, or several without an index.
    """
    indexes = [path for path in sorted(folder.glob("*.safetensors.index.json")) if path.name == _INDEX]
    indexes = indexes or sorted(folder.glob("*.safetensors.index.json"))
    if indexes:
        try:
            weight_map = json.loads(indexes[0].read_text())["weight_map"]
            return [folder / str(name) for name in dict.fromkeys(weight_map.values())]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"{indexes[0]} has no weight_map; fetch the model again") from error
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        content = f"{len(files)} files *.safetensors and no {_INDEX}" if files else "no *.safetensors"
        raise ModelLoadError(
            f"the quantised model in {folder} has {content}; a quantised model is read from {_WHOLE}, from the files "
            "of an index, or from a single file: fetch it again"
        )
    return files


def read_headers(files: list[Path]) -> dict[str, StoredHeader]:
    """Return the tensors of ``files`` by name.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    return {name: header for path in files for name, header in _headers_of(path).items()}


def _headers_of(path: Path) -> dict[str, StoredHeader]:
    try:
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            content = file.read(length) if length <= _MAX_HEADER_BYTES else b""
        entries = msgspec.json.decode(content, type=dict[str, _Entry])
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}; fetch the model again") from error
    except (struct.error, msgspec.DecodeError) as error:
        raise _damaged(path) from error
    start = _LENGTH.size + length
    return {
        name: StoredHeader(entry.dtype, entry.shape, path, start + entry.data_offsets[0])
        for name, entry in entries.items()
        if entry.dtype
    }


def _damaged(path: Path) -> ModelLoadError:
    return ModelLoadError(f"{path} is damaged or cut short; fetch it again")
