"""``python -m penstock.worker.serving.fork_server``: import the modules of a worker process once, and fork workers.

A worker process outlives the fork server and its supervisor: once the supervisor has exited, the worker releases its
requests and exits.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from ...shared.process import plain_structlog  # noqa: F401  # before structlog
from ..processes.fork_server import Kind, be_fork_server, ignore_stops, name_process, take_streams
from ..processes.forking import NUM_WORKER_DESCRIPTORS, ForkWorker
from . import process


def _become_worker(request: ForkWorker, streams: Sequence[int]) -> int:
    take_streams(streams)
    # The server's own objects belong to other descriptors.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    name_process(f"worker {request.engine_id.rpartition('-')[2]}")
    return process.main()


WORKERS = Kind("worker process", {ForkWorker: NUM_WORKER_DESCRIPTORS}, _become_worker, outlives_asker=True)


def main() -> None:
    """Run the fork server on the inherited socket."""
    parser = argparse.ArgumentParser(prog="penstock.worker.serving.fork_server", description=__doc__)
    parser.add_argument("--listen-fd", type=int, required=True, help="file descriptor of the listening Unix socket")
    options = parser.parse_args()
    ignore_stops()
    with suppress(ImportError):
        import uvloop  # noqa: F401  # worker processes use it if it is installed
    name_process("worker forks")
    be_fork_server(options.listen_fd, WORKERS)


if __name__ == "__main__":
    main()
