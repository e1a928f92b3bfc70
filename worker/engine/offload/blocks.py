"""KV blocks as bytes: how they are copied from and to the device, and the identity of their contents.

The bytes of a block are its parts in all layers, concatenated, in each cache's layout. An engine's identity determines
them together with a block's hash. It covers all weights in memory, and all settings that affect how keys and values are
computed and laid out. Engines with different identities never share blocks. The weights in memory are read instead of
their files, because the operator's code may have changed them, and random ones (``load_format`` "dummy") have no file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ....kernels import native
from ....shared.values.distribution import VERSION
from ...config.engine_config import EngineConfig
from ...models.lean.layers.decoder import LeanDecoder
from ...models.loaded import LoadedModel
from ...models.placing.packed_linear import PackedLinear
from ...processes.host import usable_cores
from ..setup.host import processor

# Bytes copied at a time; between two copies another thread may use the device.
_CHUNK_BYTES = 8 << 20
_MAX_CHUNK_BLOCKS = 64
Rows = NDArray[np.uint8]
# Raise it when the contents of blocks of the same model change.
_FORMAT = 1
_PART_BYTES = 64 << 20
_ANGLE_POSITIONS = (1, 100, 10_000)
_CONFIG_FILE = "config.json"
_LIBRARIES = ("torch", "transformers")


class DeviceBlocks(Protocol):
    """Copies between blocks and rows of bytes. Only one thread at a time may call it."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def rows(self) -> Rows:
        """Buffer for some blocks, ``[N, block_bytes]``, in memory that the device accesses fast."""
        ...

    def read(self, blocks: Sequence[int], rows: Rows) -> None:
        """Copy ``blocks`` to as many ``rows``, and return when done. The steps that fill the blocks must have ended."""
        ...

    def write(self, rows: Rows, blocks: Sequence[int]) -> None:
        """Copy ``rows`` to ``blocks``, which no step may read, and return when done."""
        ...


def layout_of(caches: Sequence[Tensor]) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each part of a block."""
    return [(str(cache.dtype), tuple(cache.shape[1:])) for cache in caches]


def make_device_blocks(caches: Callable[[], list[Tensor]], device: torch.device) -> DeviceBlocks:
    """Return the ``DeviceBlocks`` of ``caches()``, ``[NB, ...]`` each, which may return new tensors later."""
    return (HostBlocks if device.type == "cpu" else GpuBlocks)(caches)


def _bytes_of(cache: Tensor) -> Tensor:
    """Return a view of a cache as ``[NB, bytes]``."""
    return cache.detach().flatten(1).view(torch.uint8)


def num_rows_of(block_bytes: int) -> int:
    """Return how many blocks are copied at a time."""
    return max(1, min(_MAX_CHUNK_BLOCKS, _CHUNK_BYTES // block_bytes))


class HostBlocks:
    """Blocks in the host's memory."""

    def __init__(self, caches: Callable[[], list[Tensor]]) -> None:
        self._caches = caches
        self.block_bytes = sum(_bytes_of(cache).shape[1] for cache in caches())
        self.rows = np.empty((num_rows_of(self.block_bytes), self.block_bytes), np.uint8)

    def read(self, blocks: Sequence[int], rows: Rows) -> None:
        """See ``DeviceBlocks``. numpy copies in this thread only, without the GIL; torch would use more threads."""
        index = np.asarray(blocks)
        for part, columns in self._parts():
            rows[: len(blocks), columns] = part[index]

    def write(self, rows: Rows, blocks: Sequence[int]) -> None:
        """See ``DeviceBlocks``."""
        index = np.asarray(blocks)
        for part, columns in self._parts():
            part[index] = rows[: len(blocks), columns]

    def _parts(self) -> list[tuple[Rows, slice]]:
        parts, end = [], 0
        for cache in self._caches():
            part = _bytes_of(cache).numpy()
            begin, end = end, end + part.shape[1]
            parts.append((part, slice(begin, end)))
        return parts


class GpuBlocks:
    """Blocks on a GPU, copied during its steps: in a separate stream, through pinned memory."""

    def __init__(self, caches: Callable[[], list[Tensor]]) -> None:
        self._caches = caches
        first = caches()[0]
        self.block_bytes = sum(_bytes_of(cache).shape[1] for cache in caches())
        self._stream = torch.cuda.Stream(first.device)
        shape = num_rows_of(self.block_bytes), self.block_bytes
        self._pinned = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self._staged = torch.empty(shape, dtype=torch.uint8, device=first.device)
        self.rows = self._pinned.numpy()

    @torch.inference_mode()
    def read(self, blocks: Sequence[int], rows: Rows) -> None:
        """See ``DeviceBlocks``."""
        with torch.cuda.stream(self._stream):
            index = torch.tensor(blocks, device=self._staged.device)
            count, end = len(blocks), 0
            for cache in self._caches():
                part = _bytes_of(cache)
                begin, end = end, end + part.shape[1]
                self._staged[:count, begin:end] = part.index_select(0, index)
            torch.from_numpy(rows)[:count].copy_(self._staged[:count], non_blocking=True)
            self._stream.synchronize()

    @torch.inference_mode()
    def write(self, rows: Rows, blocks: Sequence[int]) -> None:
        """See ``DeviceBlocks``."""
        with torch.cuda.stream(self._stream):
            index = torch.tensor(blocks, device=self._staged.device)
            count, end = len(blocks), 0
            self._staged[:count].copy_(torch.from_numpy(rows)[:count], non_blocking=True)
            for cache in self._caches():
                part = _bytes_of(cache)
                begin, end = end, end + part.shape[1]
                part.index_copy_(0, index, self._staged[:count, begin:end])
            self._stream.synchronize()


@torch.inference_mode()
def identity_of(config: EngineConfig, folder: Path, model: LoadedModel) -> bytes | None:
    """Return 32 bytes; None while the weights are unloaded. Reads all weights: a second per 1 to 2 GB on all cores."""
    weights = _digest_of(model.weights)
    if weights is None:
        return None
    forward, library = model.forward, native.loaded()
    formats = [call.cache_format for call in forward.attention_calls]
    config_file = folder / _CONFIG_FILE
    properties = {
        "format": _FORMAT,
        "versions": [VERSION, *(metadata.version(name) for name in _LIBRARIES)],
        "weights": weights,
        "config": hashlib.sha256(config_file.read_bytes()).hexdigest() if config_file.is_file() else "",
        "forward": [type(forward).__name__, forward.mode, model.attention_backend],
        "computing": [str(model.dtype), model.quantization, config.deterministic, config.enforce_eager],
        "caches": layout_of(forward.caches),
        "formats": [[str(cache.dtype), cache.key_scale, cache.value_scale] for cache in formats],
        "block_size": config.block_size,
        "processor": processor(config.device),
        "kernels": None if library is None else library.instructions,
    }
    return hashlib.sha256(msgspec.json.encode(properties)).digest()


def _digest_of(network: nn.Module) -> str | None:
    """Return a digest of the names, dtypes, shapes and values of all tensors; None if some are unloaded.

    Angles count by their values, because a stored model computes them by another module than the first load.
    """
    whole = hashlib.sha256()
    with ThreadPoolExecutor(usable_cores(), "kv-identity") as pool:
        for name, tensor in _tensors(network):
            if tensor.is_meta:
                return None
            whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            for digest in pool.map(_sha256, _parts(tensor)):
                whole.update(digest)
    if isinstance(network, LeanDecoder):
        positions = torch.tensor(_ANGLE_POSITIONS, device=next(network.parameters()).device)
        for pair in network.angles(torch.empty(0, device=positions.device), positions):
            for angles in pair:
                whole.update(_sha256(angles.contiguous().flatten().view(torch.uint8)))
    return whole.hexdigest()


def _tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers, and the tensors of packed layers, each once.

    Buffers that no file contains follow from the configuration. A stored model may not have them.
    """
    yielded: set[int] = set()
    for path, module in network.named_modules():
        plain = vars(module) if isinstance(module, PackedLinear) else {}
        for holder in (module._parameters, module._buffers, plain):
            for name, tensor in holder.items():
                if name in module._non_persistent_buffers_set:
                    continue
                if isinstance(tensor, Tensor) and id(tensor) not in yielded:
                    yielded.add(id(tensor))
                    yield f"{path}.{name}", tensor


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of ``tensor`` in parts."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:  # oneDNN's layout
        plain = plain.to_dense()
    if plain.numel() == 0:
        return
    yield from plain.contiguous().flatten().view(torch.uint8).split(_PART_BYTES)


def _sha256(part: Tensor) -> bytes:
    return hashlib.sha256(part.cpu().numpy().data).digest()
