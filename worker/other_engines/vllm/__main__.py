"""``PYTHON -m penstock.worker.other_engines.vllm --fd N``: vLLM's engine core, over an inherited socket."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from ...config.engine_config import EngineConfig
from ...core.command_line import run_core
from ...core.interface import Engine
from ...processes.progress import ProgressWriter


def main() -> NoReturn:
    """Run until the worker process requests the end, and exit."""
    # vLLM logs to standard output, which the supervisor of the worker process reads as status lines.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    status = run_core("penstock.worker.other_engines.vllm", __doc__, sys.argv[1:], _build)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without cleanup, since threads of vLLM and its libraries would keep a failed core from exiting.
    os._exit(status)


def _build(config: EngineConfig, progress: ProgressWriter) -> Engine:
    from .composition import build_engine

    return build_engine(config, progress)


if __name__ == "__main__":
    main()
