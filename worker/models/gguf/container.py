"""The content of a GGUF file: values by key, and tensors by name as bytes that stay in the file.

Source: ggml-org/ggml, docs/gguf.md. Everything is checked before it is used: a file may be truncated or forged.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....shared.errors import ModelLoadError
from ....shared.values.distribution import install_command
from .parts import MAGIC, check_magic, parts_of, unreadable

_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class TensorType(NamedTuple):
    """The storage of numbers: ``num_bytes`` per ``num_values``."""

    name: str
    num_values: int
    num_bytes: int


# By ggml's numbers. Types that cannot be unpacked are named in the error message.
TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
}
# Types whose values are numbers of rows in large tables, which the package gguf contains.
BY_PACKAGE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
_OTHER_TYPES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0"}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file.

    Args:
        shape: in torch's order; ggml's is the reverse.
        data: [..., bytes of a row] uint8, in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorType
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class GgufFile:
    """An opened file.

    Args:
        values: by key.
        tensors: by name, of all parts of the file.
    """

    path: Path
    values: dict[str, Any]
    tensors: dict[str, GgufTensor]


def open_gguf(path: Path) -> GgufFile:
    """Read the header of ``path``, and of the files that continue it.

    Raises:
        ModelLoadError: a file is missing, not GGUF, truncated, or has numbers in an unsupported form.
    """
    values: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for part in parts_of(path):
        try:
            part_values, part_tensors = _read(part)
        except (struct.error, IndexError, RecursionError) as error:
            raise ModelLoadError(f"{part} is damaged or cut short; fetch it again") from error
        except OSError as error:
            raise unreadable(part, error) from error
        values = part_values | values
        tensors |= part_tensors
    return GgufFile(path, values, tensors)


class _Head:
    """Reads the header of a file sequentially."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data.data
        self.at = 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def text(self) -> str:
        length = self.number("Q")
        content = bytes(self._data[self.at : self.at + length])
        if len(content) != length:
            raise IndexError
        self.at += length
        # Tokens may be pieces of a character.
        return content.decode(errors="surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise IndexError
            value = self.number(_SCALARS[kind])
            # 1e-6 was meant, not the nearest float32.
            return float(str(np.float32(value))) if kind == _FLOAT32 else value
        item_kind, length = self.number("I"), self.number("Q")
        if length > len(self._data):
            raise IndexError
        if item_kind in _SCALARS:
            value = struct.unpack_from(f"<{length}{_SCALARS[item_kind]}", self._data, self.at)
            self.at += struct.calcsize(f"<{length}{_SCALARS[item_kind]}")
            return list(value)
        if item_kind == _STRING:
            return self._texts(length)
        return [self.value(item_kind) for _ in range(length)]

    def _texts(self, length: int) -> list[str]:
        # A loop of its own, since vocabularies have hundreds of thousands.
        data, at, texts, end = self._data, self.at, [], len(self._data)
        for _ in range(length):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            texts.append(str(data[start:at], "utf-8", "surrogateescape"))
        if at > end:
            raise IndexError
        self.at = at
        return texts


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except ValueError as error:  # an empty file
        raise ModelLoadError(f"{path} is empty; fetch it again") from error
    head = _Head(data)
    check_magic(path, bytes(data[: len(MAGIC)]))
    head.at = len(MAGIC)
    version = head.number("I")
    if version not in _VERSIONS:
        raise ModelLoadError(f"{path} is GGUF of version {version}, and 2 and 3 are read; convert the model anew")
    num_tensors, num_values = head.number("Q"), head.number("Q")
    values = {}
    for _ in range(num_values):
        key = head.text()
        values[key] = head.value(head.number("I"))
    heads = [_read_tensor_head(head, path) for _ in range(num_tensors)]
    alignment = values.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise IndexError
    start = -(-head.at // alignment) * alignment
    return values, {tensor.name: tensor for tensor in map(partial(_place, data, start, path), heads)}


class _TensorHead(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: TensorType
    offset: int


def _read_tensor_head(head: _Head, path: Path) -> _TensorHead:
    name, num_dimensions = head.text(), head.number("I")
    if num_dimensions > _MAX_DIMENSIONS:
        raise IndexError
    shape = tuple(head.number("Q") for _ in range(num_dimensions))[::-1]
    number, offset = head.number("I"), head.number("Q")
    kind = TYPES.get(number)
    if kind is None:
        raise ModelLoadError(
            f"{path} has {name} in {_OTHER_TYPES.get(number, f'type {number}')}, and "
            f"{', '.join(each.name for each in TYPES.values())} are read; fetch the model in one of these, Q4_K_M or "
            "Q8_0 for example"
        )
    if kind.name in BY_PACKAGE and find_spec("gguf") is None:
        raise ModelLoadError(
            f"{path} has {name} in {kind.name}, which the package gguf reads; install it beside the worker "
            f"({install_command('gguf')}), or fetch the model in another type, Q4_K_M for example"
        )
    return _TensorHead(name, shape, kind, offset)


def _place(data: NDArray[np.uint8], start: int, path: Path, head: _TensorHead) -> GgufTensor:
    *rows, length = head.shape or (1,)
    if length % head.kind.num_values:
        raise ModelLoadError(f"{path} has {head.name} with rows of {length} in {head.kind.name}; fetch it again")
    row_bytes = length // head.kind.num_values * head.kind.num_bytes
    begin = start + head.offset
    content = data[begin : begin + int(np.prod(rows, dtype=object)) * row_bytes]
    if len(content) != int(np.prod(rows, dtype=object)) * row_bytes:
        raise ModelLoadError(f"{path} is cut short: {head.name} lies beyond its end; fetch it again")
    return GgufTensor(head.name, head.shape, head.kind, content.reshape(*rows, row_bytes))
