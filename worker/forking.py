"""What is said to a fork server, and by it, when an engine core or a worker process is to be forked.

worker process, or its supervisor                      fork server
ForkCore + channel, progress, trace, out, err
  | ForkWorker + in, out, err                   ──▶
                                                ◀──    Forked(pid) + pidfd | NotForked(reason)
                                                ◀──    ChildExited(returncode)
(end of the stream: nobody wants the core any more, and the server kills it; a worker process knows by its life line)

Frames are those of ``ipc.py`` on a Unix socket, which carries the descriptors beside the first bytes.
"""

from __future__ import annotations

import msgspec

# Raised with any change below: a process that was started after an upgrade may meet an older server.
FORK_VERSION = 2
# Of ``ForkCore``, in this order: channel, progress, trace, standard output, standard error.
NUM_DESCRIPTORS = 5
# Of ``ForkWorker``, in this order: standard input, output and error.
NUM_WORKER_DESCRIPTORS = 3


class ForkCore(msgspec.Struct, frozen=True, kw_only=True, tag="fork", array_like=True):
    """Ask for an engine core.

    Args:
        version: ``FORK_VERSION`` of who asks.
        engine_id: a core of the same engine that has not ended yet is killed and waited for first.
        environment: all of it, as bytes: a file name in it need not be text.
        folder: working directory.
        module_paths: ``sys.path``.
        log_options: options of the core's command line that say how it logs.
    """

    version: int
    engine_id: str
    environment: dict[bytes, bytes]
    folder: bytes
    module_paths: list[str]
    log_options: list[str]


class ForkWorker(msgspec.Struct, frozen=True, kw_only=True, tag="fork_worker", array_like=True):
    """Ask for a worker process, which reads its configuration from its standard input.

    Args:
        version: ``FORK_VERSION`` of who asks.
        engine_id: whose it is; one of the same engine that has not ended yet is killed and waited for first.
        environment: as of ``ForkCore``.
        folder: working directory.
        module_paths: ``sys.path``.
    """

    version: int
    engine_id: str
    environment: dict[bytes, bytes]
    folder: bytes
    module_paths: list[str]


class Forked(msgspec.Struct, frozen=True, tag="forked", array_like=True):
    """There it is; the descriptor beside this says when it has ended."""

    pid: int


class NotForked(msgspec.Struct, frozen=True, tag="not_forked", array_like=True):
    """It cannot be forked; who asked starts it the ordinary way."""

    reason: str


class ChildExited(msgspec.Struct, frozen=True, tag="exited", array_like=True):
    """How it ended: as ``Popen.returncode``."""

    returncode: int


ForkRequest = ForkCore | ForkWorker
ForkAnswer = Forked | NotForked | ChildExited


def workers_address(fork_server: str) -> str:
    """The socket where worker processes are asked for, of a host whose cores are asked for at ``fork_server``."""
    return f"{fork_server}-workers" if fork_server else ""
