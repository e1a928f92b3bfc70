"""Options of an engine that contradict each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

import msgspec

from ...shared.errors import ConfigurationError
from ...shared.values.shown import shown
from ...shared.values.urls import mask_url

# Whose option it is.
_OWNERS = {"engine_python": "vllm", "engine_options": "vllm", "engine_url": "http", "engine_command": "http"}


def check_engine(engine: str, **options: str) -> None:
    """Raises ``ConfigurationError`` if an engine is given options of another one, or lacks the server's address."""
    for name, value in options.items():
        if value and engine != _OWNERS[name]:
            who = "Penstock's own engine" if engine == "penstock" else f"engine {engine!r}"
            raise ConfigurationError(f"{name} is not for {who}; give --engine {_OWNERS[name]}, or leave it out")
    if engine == "http":
        _check_url(options["engine_url"])


def check_taken(
    config: msgspec.Struct, engine: str, taken: Collection[str], instead: Mapping[str, str] | None = None
) -> None:
    """Refuse options that mean nothing to an engine.

    Args:
        taken: fields of ``config`` that mean something to it; any other has to be at its default.
        instead: what to do about some of the others.

    Raises:
        ConfigurationError: one is not at its default; names it and the remedy.
    """
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        if field.name in taken or value == field.default:
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
    """Raises ``ConfigurationError`` where nothing can be guessed."""
    if speculative == "off":
        return
    if async_scheduling:
        raise ConfigurationError(
            f"speculative {speculative!r} and async_scheduling exclude each other: what follows guesses can only be "
            "scheduled when they have been verified; leave one of them out"
        )
    if engine != "penstock":
        raise ConfigurationError(
            f"speculative {speculative!r} is for Penstock's own engine; give engine {engine} its own options for that"
        )


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
