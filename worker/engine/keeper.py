"""The keeper of an engine's weights: a process that loads the model and forks the engine's cores.

A forked process shares the memory of its parent until one of them writes to it, and weights are only read. So the core
that serves and the core on standby use the same pages, in the huge pages that the model was loaded into, and neither
loads anything. The keeper outlives both, so the next standby shares the pages, too.

CUDA does not survive a fork, so on a GPU there is no keeper, and a standby loads the weights itself. How they could be
shared is in ops/lab/notes/processes.md.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import structlog

from ...kernels import native
from ...shared.errors import PenstockError
from ..config.engine_config import EngineConfig
from ..models.checkpoint.folder import resolve_model_folder
from ..models.loaded import LoadedModel
from .ranks.one import OneRank
from .setup.host import load_native_kernels, set_loading_threads

# Threads of torch end shortly after the thread that they helped.
_END_OF_THREADS_S = 5.0
_POLL_S = 0.01

_inherited: tuple[EngineConfig, LoadedModel] | None = None

log = structlog.get_logger(__name__)


def inherited_model(config: EngineConfig) -> LoadedModel | None:
    """Return the model that the parent of this process has loaded; None if there is none of these options."""
    if _inherited is None or _inherited[0] != msgspec.structs.replace(config, defers_cache=False):
        return None
    return _inherited[1]


def keep_weights(config: EngineConfig) -> str:
    """Load the model of ``config`` for the children of this process.

    Returns the reason why no core can be forked from it, or "". A core that loads the model itself reports it in full.
    """
    global _inherited
    # In a thread that ends, because the threads that torch starts for it would be missing in the children.
    with ThreadPoolExecutor(1) as loader:
        try:
            model = loader.submit(_load_kept, config).result()
        except (PenstockError, OSError) as error:
            return f"the keeper of the weights has loaded no model: {error}"
    native.set_num_threads(1)
    if not _is_alone():
        return f"the keeper of the weights has {_num_threads()} threads, of which a core would lack all but one"
    _inherited = config, model
    log.info("weights_kept", model=config.model_name)
    return ""


def _load_kept(config: EngineConfig) -> LoadedModel:
    load_native_kernels(config)
    set_loading_threads(config)
    return OneRank(config, resolve_model_folder(config.model, needs_weights=config.needs_weights)).load(lambda: None)


def _is_alone() -> bool:
    """Wait until this thread is the only one of the process; return False if others stay."""
    give_up_at = time.monotonic() + _END_OF_THREADS_S
    while _num_threads() > 1:
        if time.monotonic() > give_up_at:
            return False
        time.sleep(_POLL_S)
    return True


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))
