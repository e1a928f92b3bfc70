"""``PYTHON -m penstock.worker.other_engines.http --fd N``: a core that uses a server, over an inherited socket."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from ...core.command_line import run_core
from .composition import build_engine


def main() -> NoReturn:
    """Run until the worker process requests the end, and exit."""
    status = run_core("penstock.worker.other_engines.http", __doc__, sys.argv[1:], build_engine)
    sys.stderr.flush()
    # Without cleanup, since the thread for the server's streams would keep a failed core from exiting.
    os._exit(status)


if __name__ == "__main__":
    main()
