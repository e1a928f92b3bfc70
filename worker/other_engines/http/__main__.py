"""``PYTHON -m penstock.worker.other_engines.http --fd N``: drives a server, talks over an inherited socket."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from ...core.command_line import run_core
from .composition import build_engine


def main() -> NoReturn:
    """Run until the worker process says otherwise, and end the process."""
    status = run_core("penstock.worker.other_engines.http", __doc__, sys.argv[1:], build_engine)
    sys.stderr.flush()
    # The thread that asks the server would keep a core that failed from ending.
    os._exit(status)


if __name__ == "__main__":
    main()
