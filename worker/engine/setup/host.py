"""Threads, compiled kernels and the processor that an engine uses on its host."""

from __future__ import annotations

import os
from importlib import metadata

import structlog
import torch

from ....kernels import native
from ....shared.errors import ConfigurationError
from ....shared.process.processor import this_processor
from ....shared.values.cache_folder import cache_folder
from ....shared.values.distribution import kernels_command
from ...config.engine_config import EngineConfig
from ...models.lean.native import NativeForward
from ...models.lean.staged import computing_layers
from ...models.loaded import LoadedModel
from ...models.pooling.compiled_encoder import CompiledEncoder
from ...processes.host import usable_cores

_SMALL_MODEL_PARAMETERS = 20_000_000
# The operations of a small model are too short for more threads.
_SMALL_MODEL_THREADS = 4

log = structlog.get_logger(__name__)


def set_loading_threads(config: EngineConfig) -> None:
    """Set the number of threads of torch for a load.

    The many small operations that read a model's structure would wait for each other's threads on a busy machine: on
    two cores with a load of 12, the first load of a 270M model took 28 s of processor time with two threads and 12
    with one.
    """
    if config.device == "cpu":
        torch.set_num_threads(choose_num_threads(config, _SMALL_MODEL_PARAMETERS, is_native=False))


def set_num_threads(config: EngineConfig, model: LoadedModel) -> None:
    """Set the number of threads of the compiled library or of torch, whichever computes ``model``.

    The other one gets a single thread, because idle threads of torch occupy their cores for a while.
    """
    if config.device != "cpu":
        return
    is_native = isinstance(computing_layers(model.forward), NativeForward | CompiledEncoder)
    num_threads = choose_num_threads(config, model.num_parameters, is_native=is_native)
    native.set_num_threads(num_threads)
    torch.set_num_threads(1 if is_native else num_threads)


def choose_num_threads(config: EngineConfig, num_parameters: int, *, is_native: bool) -> int:
    """Return the number of threads of a CPU engine, or of one of its ranks.

    ``num_threads`` of the configuration has precedence. The compiled library (``is_native``) uses all of the engine's
    share of the cores, because a thread that waits for a core delays only its own piece of work. In torch a waiting
    thread delays all others: next to a busy process, on two cores, a 1.3M model generated 85 tokens/s with two threads
    and 2,300 with one (on an idle machine 4,200 and 3,000). So torch uses one thread for a small model, and one less
    than the share for others.
    """
    if config.num_threads:
        return config.num_threads
    share = max(1, usable_cores() // (config.num_engines_on_host * config.num_ranks_on_host))
    is_small = num_parameters < _SMALL_MODEL_PARAMETERS
    if is_native:
        return min(share, _SMALL_MODEL_THREADS) if is_small else share
    return 1 if is_small else max(1, share - 1)


def load_native_kernels(config: EngineConfig) -> None:
    """Load the kernels of ``kernels/native`` if the engine can use them, and compile them if necessary.

    Raises:
        ConfigurationError: they cannot be compiled or loaded, and an option requires them.
    """
    if config.device != "cpu" or not config.native_kernels:
        native.unload()
        return
    stale_version = native.stale_version()
    if stale_version is not None:
        log.warning("kernels_package_stale", installed=stale_version, remedy=kernels_command())
    if native.needs_compiling():
        log.info("native_kernels_compiling")
    reason = native.load()
    library = native.loaded()
    if reason is None and library is not None:
        log.info("native_kernels", instructions=library.instructions, library=str(library.path))
        if library.tiles_refusal:
            log.warning("tiles_refused", reason=library.tiles_refusal, instructions=library.instructions)
        return
    if config.quantization is not None:
        raise ConfigurationError(f"quantization {config.quantization!r} needs the compiled kernels, but {reason}")
    if config.attention_backend == "native":
        raise ConfigurationError(f"attention_backend 'native' needs the compiled kernels, but {reason}")
    log.info("native_kernels_missing", reason=reason)


def store_triton_kernels() -> None:
    """Let Triton store compiled kernels in Penstock's cache, a folder per version. A folder that the user sets stays.

    Triton's default is in the home folder, which a container does not keep, while the cache is a volume there.
    """
    versions = "-".join(f"{name}-{metadata.version(name)}" for name in ("triton", "torch"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "triton" / versions))


def processor(device: str) -> tuple[str, list[str]]:
    """Return the name and the instruction sets of the GPU or CPU that an engine on ``device`` computes on."""
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return torch.cuda.get_device_name(), [f"sm_{major}{minor}"]
    return this_processor()
