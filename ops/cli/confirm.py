"""Confirmation of changes that cannot be undone."""

from __future__ import annotations

import argparse
import sys

from ...shared.process.command_line import UsageError


def confirmed(question: str, arguments: argparse.Namespace) -> bool:
    """Return whether ``--yes`` was passed, or the user confirms at the terminal.

    Raises:
        UsageError: standard input is no terminal, and ``--yes`` was not passed.
    """
    if arguments.yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"without a terminal to ask on, --yes must be given: {question}")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
