"""Weights of a decoder as they are packed in memory, in a file, so that a later load neither unpacks nor packs them.

Choosing weights of four bits by examples takes seconds per hundred million parameters, and the blocks of a GGUF file
must be unpacked. Tables of embeddings are used in the file, so only the rows in use take memory.

A file has the length of its header in eight bytes, the header in msgpack, and the tensors, aligned to 64 bytes.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ....kernels.huge_pages import Arena
from ....kernels.linear import PackedWeight
from ....shared.errors import ModelLoadError
from ..lean.layers.decoder import LeanDecoder
from ..placing.packed_linear import OwnPackedLinear, replace_linear_layers
from .cache_files import newest_first, replace_file
from .file_module import ScaledEmbedding

SUFFIX = ".weights"
_LENGTH_BYTES = 8
_ALIGNMENT = 64
# Of all files. The newest one is kept in any case.
_MAX_BYTES = 32 << 30
# Of the free space, by a file.
_MAX_PART = 0.25
_CHUNK_BYTES = 16 << 20
_WORD = (1 << 64) - 1
# Name of the bias of a packed layer, in the dtype of the model. A packed weight has one in float32.
_BIAS = "plain_bias"
_FIELDS = tuple(field.name for field in dataclasses.fields(PackedWeight))

log = structlog.get_logger(__name__)


class _StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of a file, whose first byte is at ``begin`` after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    checksum: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


class _Header(msgspec.Struct, frozen=True):
    """The header of a file.

    Args:
        build: digest of the code, the versions of libraries and the processor.
        shapes: of the tensors in the model's own files, by name.
        tensors: by the names of modules and of their tensors.
    """

    build: str
    shapes: dict[str, tuple[int, ...]]
    tensors: dict[str, _StoredTensor]


class PackedWeights:
    """The weights in the file ``path``.

    Raises:
        ModelLoadError: the file is missing, damaged, or of another build.
    """

    def __init__(self, path: Path, build: str) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                self.num_bytes = os.fstat(file.fileno()).st_size
                header = msgspec.msgpack.decode(file.read(min(length, self.num_bytes)), type=_Header)
        except (OSError, msgspec.DecodeError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        self.start = _aligned(_LENGTH_BYTES + length)
        if header.build != build:
            raise ModelLoadError(f"{path} is of another build")
        if self.start + max(each.begin + each.num_bytes for each in header.tensors.values()) > self.num_bytes:
            raise ModelLoadError(f"{path} is cut short")
        self.shapes = header.shapes
        self.tensors = header.tensors

    def give_weights(self, network: LeanDecoder) -> None:
        """Set the weights of ``network``, whose linear layers are not packed and whose tensors have no content.

        Raises:
            ModelLoadError: the file is damaged, or lacks a tensor.
        """
        with self.path.open("rb") as file:
            content = _Content(self, file)
            replace_linear_layers(network, content.packed_linear)
            for name, module in network.named_modules():
                read = content.mapped if isinstance(module, ScaledEmbedding) else content.load
                for leaf, empty in module._parameters.items():
                    if empty is not None:
                        module._parameters[leaf] = nn.Parameter(read(f"{name}.{leaf}"), requires_grad=False)

    def map_embeddings(self, network: LeanDecoder) -> None:
        """Replace the embeddings of ``network``, which are those of the file, by the mapped ones.

        Raises: as ``give_weights``.
        """
        with self.path.open("rb") as file:
            content = _Content(self, file)
            for name, module in network.named_modules():
                if isinstance(module, ScaledEmbedding | nn.Embedding):
                    module.weight = nn.Parameter(content.mapped(f"{name}.weight"), requires_grad=False)


class _Content:
    """Reads the tensors of ``weights`` from ``file``."""

    def __init__(self, weights: PackedWeights, file: BufferedReader) -> None:
        self._weights = weights
        self._file = file
        self._arena = Arena()
        path, size = str(weights.path), weights.num_bytes
        self._mapped = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)

    def packed_linear(self, path: str, linear: nn.Linear) -> OwnPackedLinear | None:
        """Return the packed form of ``linear``, which has no content; None if it was not packed."""
        stored = self._weights.tensors
        if f"{path}.packed" not in stored:
            return None
        tensors = {name: self.load(f"{path}.{name}") for name in (*_FIELDS, _BIAS) if f"{path}.{name}" in stored}
        bias = tensors.pop(_BIAS, None)
        linear.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        sizes: Any = {"num_inputs": linear.in_features, "num_outputs": linear.out_features}
        return OwnPackedLinear(linear, PackedWeight(**{"bias": None, **tensors, **sizes}))

    def load(self, name: str) -> Tensor:
        """Return a tensor in memory of its own."""
        stored = self._locate(name)
        tensor = self._arena.zeros(stored.shape, stored.torch_dtype)
        self._file.readinto(_memory_of(tensor).data)
        self._check(name, _checksum(_memory_of(tensor)))
        return tensor

    def mapped(self, name: str) -> Tensor:
        """Return a tensor in the mapped file. Pages that are not used take no memory."""
        stored = self._locate(name)
        # Read for the checksum, since pages of the mapping would stay in memory.
        self._check(name, sum(_checksum(chunk) for chunk in self._chunks(stored.num_bytes)))
        begin = self._weights.start + stored.begin
        return self._mapped[begin : begin + stored.num_bytes].view(stored.torch_dtype).view(stored.shape)

    def _locate(self, name: str) -> _StoredTensor:
        """Return the description of a tensor, and go to its first byte."""
        stored = self._weights.tensors.get(name)
        if stored is None:
            raise ModelLoadError(f"{self._weights.path} lacks {name}")
        self._file.seek(self._weights.start + stored.begin)
        return stored

    def _chunks(self, num_bytes: int) -> Iterator[NDArray[np.uint8]]:
        buffer = np.empty(min(num_bytes, _CHUNK_BYTES), np.uint8)
        for begin in range(0, num_bytes, _CHUNK_BYTES):
            chunk = buffer[: num_bytes - begin]
            self._file.readinto(chunk.data)
            yield chunk

    def _check(self, name: str, checksum: int) -> None:
        if checksum & _WORD != self._weights.tensors[name].checksum:
            raise ModelLoadError(f"{self._weights.path} has damaged content: {name}")


def write_packed_weights(path: Path, build: str, network: LeanDecoder, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Write the weights of ``network``, whose linear layers are packed, unless they would fill the disk.

    Returns whether they were written.

    Args:
        build, shapes: as in ``_Header``.
    """
    tensors = dict(_tensors_of(network))
    begins = [0, *accumulate(_aligned(tensor.nbytes) for tensor in tensors.values())]
    stored = {
        name: _StoredTensor(
            str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), begin, _checksum(_memory_of(tensor)) & _WORD
        )
        for (name, tensor), begin in zip(tensors.items(), begins, strict=False)
    }
    header = msgspec.msgpack.encode(_Header(build, {name: tuple(shape) for name, shape in shapes.items()}, stored))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if begins[-1] > _MAX_PART * shutil.disk_usage(path.parent).free:
            raise OSError("they would take more than a quarter of the free space")
        replace_file(path, _contents_of(header, tensors.values()))
        _remove_oldest(path.parent)
    except OSError as error:
        # The next start takes longer, and nothing else.
        log.warning("packed_weights_not_written", path=str(path), reason=str(error))
        return False
    return True


def _contents_of(header: bytes, tensors: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the content of a file."""
    start = len(header).to_bytes(_LENGTH_BYTES, "little") + header
    for content in (np.frombuffer(start, np.uint8), *map(_memory_of, tensors)):
        yield content.data
        yield bytes(_aligned(len(content)) - len(content))


def _remove_oldest(folder: Path) -> None:
    files = newest_first(folder, SUFFIX)
    totals = accumulate(path.stat().st_size for path in files)
    for path, total in list(zip(files, totals, strict=True))[1:]:
        if total > _MAX_BYTES:
            path.unlink(missing_ok=True)


def _tensors_of(network: LeanDecoder) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight by the name of its module and its own."""
    for name, module in network.named_modules(remove_duplicate=False):
        tensors: Iterable[tuple[str, object]] = module._parameters.items()
        if isinstance(module, OwnPackedLinear):
            weight = module.packed_weight
            tensors = [*((field, getattr(weight, field)) for field in _FIELDS), (_BIAS, module.bias)]
        for leaf, tensor in tensors:
            if isinstance(tensor, Tensor):
                yield f"{name}.{leaf}", tensor.detach().contiguous()


def _memory_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _checksum(content: NDArray[np.uint8]) -> int:
    """Return the sum of words of eight bytes, which is faster than a digest and finds damage, not a forgery."""
    whole = len(content) // 8 * 8
    return int(content[:whole].view(np.uint64).sum()) + int.from_bytes(content[whole:].tobytes(), "little")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
