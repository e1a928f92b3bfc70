"""Where a model is loaded to."""

from __future__ import annotations

import torch

from ...shared.errors import ConfigurationError
from ..config.engine_config import EngineConfig

# Of a GPU, from which on Triton converts to float8_e4m3fn.
_FLOAT8_CAPABILITY = (8, 9)


def device_of(config: EngineConfig) -> torch.device:
    """Return the device of ``config``.

    Raises:
        ConfigurationError: it is not there, or lacks what the configuration wants.
    """
    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise ConfigurationError(
                "device is 'cuda', but torch sees no GPU; use --device cpu or install a CUDA torch"
            )
        check_float8(config, torch.cuda.get_device_capability())
    return torch.device(config.device)


def check_float8(config: EngineConfig, capability: tuple[int, int]) -> None:
    """Verify that a GPU of ``capability`` has the floats of eight bits that ``config`` wants.

    Raises:
        ConfigurationError: it has not; says what it has.
    """
    if capability >= _FLOAT8_CAPABILITY:
        return
    has = f"compute capability 8.9 or newer (Ada, Hopper), and this GPU has {capability[0]}.{capability[1]}"
    if config.quantization == "fp8":
        raise ConfigurationError(f"quantization 'fp8' needs {has}; use 'int8'")
    if config.eight_bit_cache == "fp8_e4m3":
        raise ConfigurationError(f"kv_cache_dtype {config.kv_cache_dtype!r} needs {has}; use 'fp8_e5m2'")
