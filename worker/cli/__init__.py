"""The program ``worker``: start engines on this host, and list, scale, drain and stop those of a deployment."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from ...shared import plain_structlog  # noqa: F401  # before structlog
from ...shared.command_line import run_program
from . import leave, listing, scale, start

COMMANDS = (start.COMMAND, listing.COMMAND, leave.DRAIN, leave.STOP, scale.COMMAND)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``worker`` with ``argv`` (the process's arguments when None) and return its exit status."""
    return run_program("worker", "Serve models to Penstock clients.", metadata.version("penstock"), COMMANDS, argv)
