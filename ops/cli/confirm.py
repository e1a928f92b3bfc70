"""The question before what cannot be undone."""

from __future__ import annotations

import argparse
import sys

from ...shared.process.command_line import UsageError


def confirmed(question: str, arguments: argparse.Namespace) -> bool:
    """Whether ``--yes`` was given, or the person at the terminal says yes.

    Raises:
        UsageError: there is no terminal to ask on, and no ``--yes``.
    """
    if arguments.yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"without a terminal to ask on, --yes must be given: {question}")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
