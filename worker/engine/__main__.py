"""``python -m penstock.worker.engine --fd N``: one engine core, talking over an inherited socket."""

from __future__ import annotations

import argparse
import socket
import sys

from ...shared.log import FORMATS, LEVELS, configure_logging
from ..ipc import CoreChannel
from .process import run_engine_core


def main() -> int:
    """Parse the command line and run until the worker process says otherwise."""
    parser = argparse.ArgumentParser(prog="penstock.worker.engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the inherited Unix socket")
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    parser.add_argument("--log-format", choices=FORMATS, default="auto")
    options = parser.parse_args()
    configure_logging(options.log_level, options.log_format)
    return run_engine_core(CoreChannel(socket.socket(fileno=options.fd)))


if __name__ == "__main__":
    sys.exit(main())
