"""Options of an engine that contradict each other."""

from __future__ import annotations

from ..shared.errors import ConfigurationError


def check_engine(engine: str, **options_of_others: str) -> None:
    """Raises ``ConfigurationError`` if our own engine is given options of another one."""
    for name, value in options_of_others.items():
        if engine == "penstock" and value:
            raise ConfigurationError(f"{name} is not for Penstock's own engine; give --engine vllm, or leave it out")


def check_quantization(quantization: str | None, device: str, *, native_kernels: bool) -> None:
    """Raises ``ConfigurationError`` where weights cannot be held so."""
    if quantization is None:
        return
    if device == "cpu" and quantization == "fp8":
        raise ConfigurationError(
            "quantization 'fp8' needs a GPU (device 'cuda'); on the CPU there are 'int8' and 'int4'"
        )
    if device == "cuda" and quantization == "int4":
        raise ConfigurationError("quantization 'int4' needs the CPU; on a GPU there are 'int8' and 'fp8'")
    if device == "cpu" and not native_kernels:
        raise ConfigurationError(f"quantization {quantization!r} needs native kernels on the CPU")


def check_attention(
    backend: str, device: str, *, native_kernels: bool, deterministic: bool, kv_cache_dtype: str
) -> None:
    """Raises ``ConfigurationError`` where ``backend`` cannot attend."""
    if backend == "triton" and device != "cuda":
        raise ConfigurationError(
            "attention_backend 'triton' needs a GPU (device 'cuda'); on the CPU there are 'native' and 'reference'"
        )
    if backend != "native":
        return
    if device != "cpu" or not native_kernels:
        raise ConfigurationError("attention_backend 'native' needs device 'cpu' and native kernels")
    if deterministic or kv_cache_dtype != "auto":
        option = "--deterministic" if deterministic else f"kv_cache_dtype {kv_cache_dtype!r}"
        raise ConfigurationError(f"attention_backend 'native' cannot do {option}; use 'auto' or 'reference'")
