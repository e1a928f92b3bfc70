"""``python -m penstock.worker.engine.fork_server``: imports torch, and perhaps transformers, once, and forks cores.

Its cores outlive it. A core is killed when the connection that requested it closes, because its worker process has then
exited or given up the start. Without this server the kernel kills a core whose worker process has exited.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
from collections.abc import Sequence

from ...shared.process import plain_structlog  # noqa: F401  # before structlog
from ...shared.process.log import add_log_arguments, configure_logging
from ..config.engine_config import EngineConfig
from ..processes.fork_server import Kind, be_fork_server, ignore_stops, name_process, take_streams
from ..processes.forking import NUM_DESCRIPTORS, NUM_KEEPER_DESCRIPTORS, ForkCore, ForkKeeper
from ..processes.process_tree import die_with_lifeline

_CUDA_NOT_INITIALIZED = 3


def _cuda_obstacle() -> str:
    """Return the reason why this process cannot fork a core because it has initialized CUDA, or ""."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    context = ctypes.c_void_p()
    if driver.cuCtxGetCurrent(ctypes.byref(context)) == _CUDA_NOT_INITIALIZED:
        return ""
    return "something in the fork server has initialized CUDA, which does not survive a fork"


def _become_core(request: ForkCore, descriptors: Sequence[int]) -> int:
    channel, progress, trace, lifeline, out, err = descriptors
    take_streams([os.open(os.devnull, os.O_RDONLY), out, err])
    name_process(f"core {request.engine_id.rpartition('-')[2]}")
    from .__main__ import run

    inherited = {"--fd": channel, "--progress-fd": progress, "--trace-fd": trace, "--lifeline-fd": lifeline}
    return run([*(word for name, number in inherited.items() for word in (name, str(number))), *request.log_options])


def _become_keeper(request: ForkKeeper, descriptors: Sequence[int]) -> int:
    *streams, listener = descriptors
    take_streams(streams)
    die_with_lifeline(sys.stdin.fileno())
    name_process(f"weights {request.engine_id.rpartition('-')[2]}")
    parser = argparse.ArgumentParser()
    add_log_arguments(parser)
    options = parser.parse_args(request.log_options)
    configure_logging(options.log_level, options.log_format)
    from .keeper import keep_weights

    be_fork_server(listener, CORES, keep_weights(EngineConfig.decode(request.engine_config)))


def _become_core_or_keeper(request: ForkCore, descriptors: Sequence[int]) -> int:
    if isinstance(request, ForkKeeper):
        return _become_keeper(request, descriptors)
    return _become_core(request, descriptors)


CORES = Kind(
    "core",
    {ForkCore: NUM_DESCRIPTORS, ForkKeeper: NUM_KEEPER_DESCRIPTORS},
    _become_core_or_keeper,
    outlives_asker=False,
    obstacle=_cuda_obstacle,
)


def preload(folder: str, *, uses_transformers: bool = True) -> str:
    """Import the modules of a core; return the reason why cores cannot be forked from this process, or "".

    Args:
        folder: folder of the model that the cores will load, whose architecture is imported as well; empty if unknown.
        uses_transformers: import transformers, too. A model whose structure is stored is loaded without it.
    """
    # To query the driver for a GPU would initialize CUDA, which does not survive a fork. NVML does not initialize it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # A single thread, because a lock that another thread holds during the fork is never released in the child.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        from . import composition  # noqa: F401  # for its imports
        from .structured import loader  # noqa: F401  # as above

        if uses_transformers:
            from ..models.loading import loader as model_loader  # noqa: F401  # as above
    except Exception as error:
        # A core that is started without the fork server reports the same error.
        return f"the engine cannot be imported: {type(error).__name__}: {error}"
    if folder and uses_transformers:
        _preload_architecture(folder)
    return _cuda_obstacle()


def _preload_architecture(folder: str) -> None:
    """Import a model's code, and compute the tables that transformers builds when it loads its first model."""
    import structlog
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    log = structlog.get_logger(__name__)
    try:
        config = AutoConfig.from_pretrained(folder)
        _ = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        # Compiles hundreds of regular expressions for all architectures. transformers 5.17 has them elsewhere.
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping(config.model_type)
    except Exception as error:  # a broken folder raises any exception; the core reports it
        log.debug("architecture_not_preloaded", folder=folder, error=str(error))


def main() -> None:
    """Serve on the inherited socket."""
    parser = argparse.ArgumentParser(prog="penstock.worker.engine.fork_server", description=__doc__)
    parser.add_argument("--listen-fd", type=int, required=True, help="file descriptor of the listening Unix socket")
    add_log_arguments(parser)
    parser.add_argument("--model", default="", help="folder of a model whose architecture is imported, too")
    parser.add_argument("--without-transformers", action="store_true", help="do not import transformers")
    options = parser.parse_args()
    configure_logging(options.log_level, options.log_format)
    ignore_stops()
    # Without collections of garbage, imports take an eighth less time.
    gc.disable()
    refusal = preload(options.model, uses_transformers=not options.without_transformers)
    gc.enable()
    name_process("fork server")
    be_fork_server(options.listen_fd, CORES, refusal)


if __name__ == "__main__":
    main()
