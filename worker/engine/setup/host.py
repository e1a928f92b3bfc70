"""What an engine takes of the host: threads, and the compiled kernels."""

from __future__ import annotations

import structlog
import torch

from ....kernels import native
from ....shared.errors import ConfigurationError
from ....shared.processor import this_processor
from ...config.engine_config import EngineConfig
from ...host import usable_cores
from ...models.lean.native import NativeForward
from ...models.loaded import LoadedModel
from ...models.pooling.compiled_encoder import CompiledEncoder

_SMALL_MODEL_PARAMETERS = 20_000_000
# Its operations are too short to be cut into more pieces.
_SMALL_MODEL_THREADS = 4

log = structlog.get_logger(__name__)


def set_num_threads(config: EngineConfig, model: LoadedModel) -> None:
    """Let ``model`` compute with as many threads as it should: the library's or torch's.

    Torch's keep their cores for a while when they are done.
    """
    if config.device != "cpu":
        return
    is_native = isinstance(model.forward, NativeForward | CompiledEncoder)
    num_threads = choose_num_threads(config, model.num_parameters, is_native=is_native)
    native.set_num_threads(num_threads)
    torch.set_num_threads(1 if is_native else num_threads)


def choose_num_threads(config: EngineConfig, num_parameters: int, *, is_native: bool) -> int:
    """Threads of a CPU engine, or of one of its ranks: ``num_threads`` if that is set.

    Else its share of the cores where the library's own threads compute (``is_native``): one that waits for a
    core holds up no more than its piece. Torch's hold up all: beside a busy process, on two cores, a 1.3M model made 85
    tokens/s with two of them and 2,300 with one (4,200 and 3,000 with the machine to itself). So there it is one for a
    small model, and for others a core less than the share.
    """
    if config.num_threads:
        return config.num_threads
    share = max(1, usable_cores() // (config.num_engines_on_host * config.num_ranks))
    is_small = num_parameters < _SMALL_MODEL_PARAMETERS
    if is_native:
        return min(share, _SMALL_MODEL_THREADS) if is_small else share
    return 1 if is_small else max(1, share - 1)


def load_native_kernels(config: EngineConfig) -> None:
    """Have the kernels of ``kernels/native`` compiled and used, where that can be.

    Raises:
        ConfigurationError: they cannot, and an option needs them.
    """
    if config.device != "cpu" or not config.native_kernels:
        native.unload()
        return
    reason = native.load()
    library = native.loaded()
    if reason is None and library is not None:
        log.info("native_kernels", instructions=library.instructions)
        if library.tiles_refusal:
            log.warning("tiles_refused", reason=library.tiles_refusal, instructions=library.instructions)
        return
    if config.quantization is not None:
        raise ConfigurationError(f"quantization {config.quantization!r} needs the compiled kernels, and {reason}")
    if config.attention_backend == "native":
        raise ConfigurationError(f"attention_backend 'native' needs the compiled kernels, and {reason}")
    log.info("native_kernels_missing", reason=reason)


def processor(device: str) -> tuple[str, list[str]]:
    """Return the name and the instruction sets of the GPU or CPU that an engine on ``device`` computes on."""
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return torch.cuda.get_device_name(), [f"sm_{major}{minor}"]
    return this_processor()
