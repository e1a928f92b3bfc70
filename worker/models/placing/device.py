"""The device of a model, and copies of a step's small arrays to it."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ....shared.errors import ConfigurationError
from ....shared.process.heap import return_free_heap
from ...config.engine_config import EngineConfig

# Attribute of a copy that refers to its source.
_SOURCE = "penstock_source"

# GPUs from this compute capability on convert to float8_e4m3fn in Triton.
_FLOAT8_CAPABILITY = (8, 9)


def device_of(config: EngineConfig) -> torch.device:
    """Return the device of ``config``.

    Raises:
        ConfigurationError: it is missing, or lacks a feature that the configuration needs.
    """
    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise ConfigurationError(
                "device is 'cuda', but torch sees no GPU; use --device cpu or install a CUDA torch"
            )
        check_float8(config, torch.cuda.get_device_capability())
    return torch.device(config.device)


def check_float8(config: EngineConfig, capability: tuple[int, int]) -> None:
    """Verify that a GPU of ``capability`` supports the 8-bit floats that ``config`` needs.

    Raises:
        ConfigurationError: it does not; the message has its capability.
    """
    if capability >= _FLOAT8_CAPABILITY:
        return
    has = f"compute capability 8.9 or newer (Ada, Hopper), and this GPU has {capability[0]}.{capability[1]}"
    if config.quantization == "fp8":
        raise ConfigurationError(f"quantization 'fp8' needs {has}; use 'int8'")
    if config.eight_bit_cache == "fp8_e4m3":
        raise ConfigurationError(f"kv_cache_dtype {config.kv_cache_dtype!r} needs {has}; use 'fp8_e5m2'")


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return ``array`` as a tensor on ``device``, without waiting for it; on the CPU it is the same memory.

    The copy is made from pinned memory, or it would wait for all pending work of the device. Torch keeps pinned
    buffers, and reuses one when the event after its last copy has passed, however many steps are in flight.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    copy = tensor.pin_memory().to(device, non_blocking=True)
    setattr(copy, _SOURCE, array)
    return copy


def host_array(tensor: Tensor) -> NDArray[Any]:
    """Return ``tensor`` as an array on the host, without waiting for the device if ``to_device`` created it.

    The array that was passed to ``to_device`` must not have changed since.
    """
    source = getattr(tensor, _SOURCE, None)
    return tensor.detach().cpu().numpy() if source is None else source


def return_free_memory() -> None:
    """Return freed memory to the device and the operating system; the allocators would keep it for later."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return_free_heap()
