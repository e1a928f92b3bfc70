"""Standard streams that are closed, or whose reader has left: a service goes on without them."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path


def open_closed_streams() -> None:
    """Put the null device in the place of closed standard streams.

    Python has None for them. Without this the next socket gets the free number, and whatever a child or a library
    writes to standard error goes there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
    # Should a library have opened a file under the number before, it is not written to.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null_stream = Path(os.devnull).open(mode)  # noqa: SIM115  # open until the process ends
            setattr(sys, name, null_stream)


def print_if_read(line: str) -> None:
    """Print a line of a service, which goes on if the reader of its output has left, or the disk is full."""
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except OSError:
        discard_output()


def is_output_unread() -> bool:
    """Whether standard output is a pipe whose reader has left."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def output_error() -> str | None:
    """Return why standard output cannot be written, for example a full disk; None if it can.

    Writes a line end to find out, because an unbuffered stream keeps nothing of the write that failed.
    """
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as error:
        return error.strerror or str(error)
    return None


def discard_output() -> None:
    """Redirect standard output to the null device. Otherwise Python fails again when it flushes at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
