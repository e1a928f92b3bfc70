"""What has to be the same, beside a block's hash, for its bytes to be those that an engine would compute.

All weights, as they lie in memory, and all that decides how keys and values are computed and laid out. An engine that
differs in any of it has blocks of its own and never meets these. The weights are read, not their files: a method of the
operator's may have changed them, and random ones (``load_format`` "dummy") have no file.
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
from ...host import usable_cores
from ...models.loaded import LoadedModel
from ...models.placing.packed_linear import PackedLinear
from ..setup.host import processor
from .device_blocks import layout_of

# To be raised when blocks of the same model would mean something else.
_FORMAT = 1
_PART_BYTES = 64 << 20
_CONFIG_FILE = "config.json"
_LIBRARIES = ("penstock", "torch", "transformers")


def identity_of(config: EngineConfig, folder: Path, model: LoadedModel) -> bytes | None:
    """32 bytes; None while the weights are not there. Reads all of them: a second for 1 to 2 GB, by all cores."""
    weights = _digest_of(model.weights)
    if weights is None:
        return None
    forward, library = model.forward, native.loaded()
    formats = [call.cache_format for call in forward.attention_calls]
    config_file = folder / _CONFIG_FILE
    told = {
        "format": _FORMAT,
        "versions": [metadata.version(name) for name in _LIBRARIES],
        "weights": weights,
        "config": hashlib.sha256(config_file.read_bytes()).hexdigest() if config_file.is_file() else "",
        "forward": [type(forward).__name__, forward.mode, model.attention_backend],
        "computing": [str(model.dtype), config.quantization, config.deterministic, config.enforce_eager],
        "caches": layout_of(forward.caches),
        "formats": [[str(one.dtype), one.key_scale, one.value_scale] for one in formats],
        "block_size": config.block_size,
        "processor": processor(config.device),
        "kernels": None if library is None else library.instructions,
    }
    return hashlib.sha256(msgspec.json.encode(told)).digest()


def _digest_of(network: nn.Module) -> str | None:
    """Of names, forms and numbers of all tensors of ``network``."""
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
    """Parameters, buffers, and what packed layers hold, each once."""
    seen: set[int] = set()
    for path, module in network.named_modules():
        plain = vars(module) if isinstance(module, PackedLinear) else {}
        for holder in (module._parameters, module._buffers, plain):
            for name, tensor in holder.items():
                if isinstance(tensor, Tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{path}.{name}", tensor


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of ``tensor``, some at a time."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:  # oneDNN's own
        plain = plain.to_dense()
    if plain.numel() == 0:
        return
    yield from plain.contiguous().flatten().view(torch.uint8).split(_PART_BYTES)


def _sha256(part: Tensor) -> bytes:
    return hashlib.sha256(part.cpu().numpy().data).digest()
