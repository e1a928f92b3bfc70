"""``python -m penstock.worker.engine --fd N``: one engine core, which uses an inherited socket."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..config.engine_config import EngineConfig
from ..core.command_line import run_core
from ..core.interface import Engine
from ..models.checkpoint.folder import resolve_model_folder
from ..processes.progress import ProgressWriter


def run(arguments: Sequence[str]) -> int:
    """Run until the worker process sends Shutdown; return the exit status."""
    return run_core("penstock.worker.engine", __doc__, arguments, _build)


def _build(config: EngineConfig, progress: ProgressWriter) -> Engine:
    folder = resolve_model_folder(config.model, needs_weights=config.needs_weights)
    # Import here, not above: torch and transformers take seconds to import, and neither Hello nor the error of a wrong
    # folder should wait for them.
    from .composition import build_engine

    return build_engine(config, folder, progress)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
