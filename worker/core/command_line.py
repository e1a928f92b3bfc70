"""The command line of an engine core's program, with the file descriptors that it inherits."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence

from ...shared.process.log import add_log_arguments, configure_logging
from ..processes.ipc import CoreChannel
from ..processes.process_tree import die_with_lifeline
from ..processes.progress import ProgressWriter
from . import exit_report
from .interface import BuildEngine
from .loop import run_engine_core


def run_core(program: str, description: str | None, arguments: Sequence[str], build: BuildEngine) -> int:
    """Parse the command line and run until the worker process sends Shutdown; return the exit status."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the inherited Unix socket")
    parser.add_argument(
        "--progress-fd", type=int, help="shared memory through which the worker reads what the core does"
    )
    parser.add_argument("--trace-fd", type=int, help="file for tracebacks: when the core dies, or at SIGUSR1")
    parser.add_argument("--lifeline-fd", type=int, help="pipe whose end kills the core: its worker process has exited")
    add_log_arguments(parser)
    options = parser.parse_args(arguments)
    if options.lifeline_fd is not None:
        die_with_lifeline(options.lifeline_fd)
    configure_logging(options.log_level, options.log_format)
    exit_report.write_to(options.trace_fd)
    channel = CoreChannel(socket.socket(fileno=options.fd))
    return run_engine_core(channel, ProgressWriter(options.progress_fd), build)
