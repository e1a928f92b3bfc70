"""``python -m penstock.worker.engine --fd N``: one engine core, talking over an inherited socket."""

from __future__ import annotations

import argparse
import faulthandler
import signal
import socket
import sys
from collections.abc import Sequence

from ...shared.log import add_log_arguments, configure_logging
from ..ipc import CoreChannel
from ..progress import ProgressWriter
from .process import run_engine_core


def run(arguments: Sequence[str]) -> int:
    """Parse the command line and run until the worker process says otherwise; returns the exit status."""
    parser = argparse.ArgumentParser(prog="penstock.worker.engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the inherited Unix socket")
    parser.add_argument("--progress-fd", type=int, help="memory that tells the worker what the core does")
    parser.add_argument("--trace-fd", type=int, help="file for the traceback of its end, or at SIGUSR1")
    add_log_arguments(parser)
    options = parser.parse_args(arguments)
    configure_logging(options.log_level, options.log_format)
    if options.trace_fd is not None:
        faulthandler.enable(options.trace_fd)
        # Says where a core hangs: the handler needs no GIL.
        faulthandler.register(signal.SIGUSR1, options.trace_fd)
    channel = CoreChannel(socket.socket(fileno=options.fd))
    return run_engine_core(channel, ProgressWriter(options.progress_fd), options.trace_fd)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
