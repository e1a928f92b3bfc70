"""Messages between a fork server and the processes that request an engine core or a worker process.

worker process, or its supervisor                      fork server
ForkCore + channel, progress, trace, out, err
  | ForkWorker + in, out, err                   ──▶
                                                ◀──    Forked(pid) + pidfd | NotForked(reason)
                                                ◀──    ChildExited(returncode)
(end of the stream: the server kills the core; a worker process exits when its standard input closes)

Frames are those of ``ipc.py`` on a Unix socket, which sends the descriptors together with the first bytes.
"""

from __future__ import annotations

import msgspec

# Increased with any change below, because a process started after an upgrade may connect to an older server.
FORK_VERSION = 2
# Descriptors of ``ForkCore``, in this order: channel, progress, trace, standard output, standard error.
NUM_DESCRIPTORS = 5
# Descriptors of ``ForkWorker``, in this order: standard input, output and error.
NUM_WORKER_DESCRIPTORS = 3


class ForkCore(msgspec.Struct, frozen=True, kw_only=True, tag="fork", array_like=True):
    """Request for an engine core.

    Args:
        version: ``FORK_VERSION`` of the requesting process.
        engine_id: id of the engine. A core of the same engine that still runs is killed and awaited first.
        environment: whole environment, as bytes, since file names in it may not be valid text.
        folder: working directory.
        module_paths: ``sys.path``.
        log_options: logging options of the core's command line.
    """

    version: int
    engine_id: str
    environment: dict[bytes, bytes]
    folder: bytes
    module_paths: list[str]
    log_options: list[str]


class ForkWorker(msgspec.Struct, frozen=True, kw_only=True, tag="fork_worker", array_like=True):
    """Request for a worker process, which reads its configuration from its standard input.

    Args:
        version: ``FORK_VERSION`` of the requesting process.
        engine_id: id of the engine. A worker process of the same engine that still runs is killed and awaited first.
        environment: as in ``ForkCore``.
        folder: working directory.
        module_paths: ``sys.path``.
    """

    version: int
    engine_id: str
    environment: dict[bytes, bytes]
    folder: bytes
    module_paths: list[str]


class Forked(msgspec.Struct, frozen=True, tag="forked", array_like=True):
    """Reply for a forked process; the descriptor sent with it shows its exit."""

    pid: int


class NotForked(msgspec.Struct, frozen=True, tag="not_forked", array_like=True):
    """Reply if the process cannot be forked; the requesting process starts it itself."""

    reason: str


class ChildExited(msgspec.Struct, frozen=True, tag="exited", array_like=True):
    """Message after the exit of the process, with its ``Popen.returncode``."""

    returncode: int


ForkRequest = ForkCore | ForkWorker
ForkAnswer = Forked | NotForked | ChildExited


def workers_address(fork_server: str) -> str:
    """Return the socket for worker processes of a host whose socket for cores is ``fork_server``."""
    return f"{fork_server}-workers" if fork_server else ""
