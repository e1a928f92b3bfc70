"""The tensors of a folder's safetensors files by name, read on request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from ....shared.errors import ModelLoadError

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"


class StoredTensors:
    """A context in which the files are open. A tensor is read only when it is requested.

    Raises:
        ModelLoadError: the folder has no such files, or an index that names missing ones.
        OSError, SafetensorError: a file cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open = ExitStack()
        self._slices: dict[str, Any] = {}

    def __enter__(self) -> StoredTensors:
        for path in _weight_files(self._folder):
            file = self._open.enter_context(safe_open(path, framework="pt"))
            self._slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no dictionary
        return self

    def __exit__(self, *_: object) -> None:
        self._slices.clear()
        self._open.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __contains__(self, name: str) -> bool:
        return name in self._slices

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())

    def dtype(self, name: str) -> str:
        """Return the dtype in safetensors' spelling: ``BF16``, ``F8_E4M3``, ``I32``."""
        return self._slices[name].get_dtype()

    def slice(self, name: str) -> Any:
        """Return an object that reads the tensor, or a part, when it is indexed."""
        return self._slices[name]

    def read(self, name: str) -> Tensor:
        return self._slices[name][...]


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of the index, else the only file, of any name, since GPTQ's are named after their bits."""
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
