"""``python -m penstock.worker.engine.ranks``: a rank above 0 of an engine. Users do not start it."""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

import structlog

from ....shared.process.log import add_log_arguments, configure_logging
from ...processes.process_tree import die_with
from .messages import RankChannel, RankCommand


def run(arguments: Sequence[str]) -> int:
    """Run until the core sends StopRank; return the exit status."""
    parser = argparse.ArgumentParser(prog="penstock.worker.engine.ranks", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the inherited socket")
    parser.add_argument("--rendezvous-fd", type=int, required=True, help="file through which ranks of a host meet")
    parser.add_argument("--parent-pid", type=int, required=True, help="process whose end ends this rank")
    parser.add_argument("--rank", type=int, required=True, help="number of this rank")
    add_log_arguments(parser)
    options = parser.parse_args(arguments)
    # A signal to the whole process group is meant for the worker process; the core stops its ranks itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with(options.parent_pid)
    configure_logging(options.log_level, options.log_format)
    structlog.contextvars.bind_contextvars(rank=options.rank)
    # Reset the fault handlers, because a forked rank inherits the core's file, and a library may have replaced them.
    faulthandler.disable()
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2)
    with suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(f"rank {options.rank}")
    channel = RankChannel(socket.socket(fileno=options.fd), RankCommand)
    # Import here, not above: torch and transformers take seconds to import, and the core may end meanwhile.
    from .follower import follow

    return follow(channel, options.rendezvous_fd)


if __name__ == "__main__":
    status = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit without joining threads, because a collective that never ends would block the exit.
    os._exit(status)
