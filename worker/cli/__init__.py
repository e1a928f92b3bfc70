"""The program ``worker``: start engines on this host, and list, scale, drain and stop those of a deployment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from ...shared.process import plain_structlog  # noqa: F401  # before structlog
from ...shared.process.command_line import EXIT_FAILED, Command, run_program


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``worker`` with ``argv`` (the process's arguments when None) and return its exit status."""
    if sys.platform != "linux":
        # Before the imports below, which fail on other systems.
        sys.stderr.write(
            f"error: the worker needs Linux, this is {sys.platform}; clients work here, with the URL of a Redis that "
            "workers on Linux serve\n"
        )
        return EXIT_FAILED
    return run_program("worker", "Serve models to Penstock clients.", load_commands(), argv)


def load_commands() -> tuple[Command, ...]:
    """Import and return the subcommands of ``worker``."""
    start, listing, leave, scale, models = (
        import_module(f"{__name__}.{name}") for name in ("start", "listing", "leave", "scale", "models")
    )
    return start.COMMAND, listing.COMMAND, leave.DRAIN, leave.STOP, scale.COMMAND, models.COMMAND
