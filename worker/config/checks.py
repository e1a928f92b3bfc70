"""Checks of options of an engine that contradict each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

import msgspec

from ...shared.errors import ConfigurationError
from ...shared.values.shown import mask_url, shown
from .computing import FOUR_BIT_FORMATS

# The engine to which an option applies.
_OWNERS = {"engine_python": "vllm", "engine_options": "vllm", "engine_url": "http", "engine_command": "http"}


def check_engine(engine: str, **options: str) -> None:
    """Raise ``ConfigurationError`` if options of another engine are set, or the server's address is missing."""
    for name, value in options.items():
        if value and engine != _OWNERS[name]:
            who = "Penstock's own engine" if engine == "penstock" else f"engine {engine!r}"
            raise ConfigurationError(f"{name} is not for {who}; give --engine {_OWNERS[name]}, or leave it out")
    if engine == "http":
        _check_url(options["engine_url"])


def check_supported(
    config: msgspec.Struct, engine: str, supported: Collection[str], instead: Mapping[str, str] | None = None
) -> None:
    """Refuse options that do not apply to an engine.

    Args:
        supported: fields of ``config`` that apply to the engine; all others must be at their default.
        instead: remedies for some of the others.

    Raises:
        ConfigurationError: an option that does not apply is set; names it and the remedy.
    """
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        if field.name in supported or value == field.default:
            continue
        remedy = (instead or {}).get(field.name, "leave it out")
        raise ConfigurationError(f"{field.name} {shown(value)} is for Penstock's engine, not for {engine!r}; {remedy}")


def _check_url(url: str) -> None:
    example = "such as http://127.0.0.1:8080"
    if not url:
        raise ConfigurationError(f"engine_url is missing: engine 'http' needs the address of a server, {example}")
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port)
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigurationError(f"engine_url must be the address of a server, {example}, got {shown(mask_url(url))}")


def check_speculation(speculative: str, engine: str, *, async_scheduling: bool) -> None:
    """Raise ``ConfigurationError`` if the options exclude speculative decoding."""
    if speculative == "off":
        return
    if async_scheduling:
        raise ConfigurationError(
            f"speculative {speculative!r} and async_scheduling exclude each other: tokens after a draft can only be "
            "scheduled when the draft is verified; leave one of them out"
        )
    if engine != "penstock":
        raise ConfigurationError(
            f"speculative {speculative!r} is for Penstock's own engine; give engine {engine} its own options for that"
        )


def check_quantization(quantization: str | None, device: str, *, native_kernels: bool) -> None:
    """Raise ``ConfigurationError`` if the device does not support a quantization."""
    if quantization is None:
        return
    if device == "cpu" and quantization == "fp8":
        raise ConfigurationError(
            "quantization 'fp8' needs a GPU (device 'cuda'); on the CPU there are 'int8', 'int4-mixed' and 'int4'"
        )
    if device == "cuda" and quantization in FOUR_BIT_FORMATS:
        raise ConfigurationError(f"quantization {quantization!r} needs the CPU; on a GPU there are 'int8' and 'fp8'")
    if device == "cpu" and not native_kernels:
        raise ConfigurationError(f"quantization {quantization!r} needs native kernels on the CPU")


def check_attention(
    backend: str, device: str, *, native_kernels: bool, deterministic: bool, kv_cache_dtype: str
) -> None:
    """Raise ``ConfigurationError`` if ``backend`` does not support the device or other options."""
    if backend == "triton" and device != "cuda":
        raise ConfigurationError(
            "attention_backend 'triton' needs a GPU (device 'cuda'); on the CPU there are 'native' and 'reference'"
        )
    if backend != "native":
        return
    if device != "cpu" or not native_kernels:
        raise ConfigurationError("attention_backend 'native' needs device 'cpu' and native kernels")
    if deterministic or kv_cache_dtype not in ("auto", "int8"):
        option = "--deterministic" if deterministic else f"kv_cache_dtype {kv_cache_dtype!r}"
        raise ConfigurationError(f"attention_backend 'native' cannot do {option}; use 'auto' or 'reference'")
