"""Identity of an engine's KV blocks: together with a block's hash it determines the block's bytes.

It covers all weights in memory, and all settings that affect how keys and values are computed and laid out. Engines
with different identities never share blocks. The weights in memory are read instead of their files, because the
operator's code may have changed them, and random ones (``load_format`` "dummy") have no file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from ....kernels import native
from ...config.engine_config import EngineConfig
from ...models.loaded import LoadedModel
from ...models.placing.packed_linear import PackedLinear
from ...processes.host import usable_cores
from ..setup.host import processor
from .device_blocks import layout_of

# Raise it when the contents of blocks of the same model change.
_FORMAT = 1
_PART_BYTES = 64 << 20
_CONFIG_FILE = "config.json"
_LIBRARIES = ("penstock", "torch", "transformers")


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
        "versions": [metadata.version(name) for name in _LIBRARIES],
        "weights": weights,
        "config": hashlib.sha256(config_file.read_bytes()).hexdigest() if config_file.is_file() else "",
        "forward": [type(forward).__name__, forward.mode, model.attention_backend],
        "computing": [str(model.dtype), config.quantization, config.deterministic, config.enforce_eager],
        "caches": layout_of(forward.caches),
        "formats": [[str(cache.dtype), cache.key_scale, cache.value_scale] for cache in formats],
        "block_size": config.block_size,
        "processor": processor(config.device),
        "kernels": None if library is None else library.instructions,
    }
    return hashlib.sha256(msgspec.json.encode(properties)).digest()


def _digest_of(network: nn.Module) -> str | None:
    """Return a digest of the names, dtypes, shapes and values of all tensors; None if some are unloaded."""
    whole = hashlib.sha256()
    with ThreadPoolExecutor(usable_cores(), "kv-identity") as pool:
        for name, tensor in _tensors(network):
            if tensor.is_meta:
                return None
            whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            for digest in pool.map(_sha256, _parts(tensor)):
                whole.update(digest)
    return whole.hexdigest()


def _tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers, and the tensors of packed layers, each once."""
    yielded: set[int] = set()
    for path, module in network.named_modules():
        plain = vars(module) if isinstance(module, PackedLinear) else {}
        for holder in (module._parameters, module._buffers, plain):
            for name, tensor in holder.items():
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
