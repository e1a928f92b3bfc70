"""What a worker process and the fork server say to each other when an engine core is to be forked.

worker process                                        fork server
ForkCore + channel, progress, trace, out, err  ──▶
                                               ◀──    Forked(pid) + pidfd | NotForked(reason)
                                               ◀──    CoreExited(returncode)
(end of the stream: nobody wants the core any more, and the server kills it)

Frames are those of ``ipc.py`` on a Unix socket, which carries the descriptors beside the first bytes.
"""

from __future__ import annotations

import msgspec

# Raised with any change below: a worker process that was started after an upgrade may meet an older server.
FORK_VERSION = 1
# Of ``ForkCore``, in this order: channel, progress, trace, standard output, standard error.
NUM_DESCRIPTORS = 5


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


class Forked(msgspec.Struct, frozen=True, tag="forked", array_like=True):
    """There it is; the descriptor beside this says when it has ended."""

    pid: int


class NotForked(msgspec.Struct, frozen=True, tag="not_forked", array_like=True):
    """It cannot be forked; the worker process starts it the ordinary way."""

    reason: str


class CoreExited(msgspec.Struct, frozen=True, tag="exited", array_like=True):
    """How it ended: as ``Popen.returncode``."""

    returncode: int


ForkAnswer = Forked | NotForked | CoreExited
