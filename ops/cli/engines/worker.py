"""``penstock worker ...``: the program ``worker``, for systems where another ``worker`` is on the PATH."""

from __future__ import annotations

import argparse
import os
import sys

from ....shared.process.command_line import Command


def _run(arguments: argparse.Namespace) -> int:
    # exec keeps signals and terminal, and this package need not import the worker's.
    os.execv(sys.executable, [sys.executable, "-m", "penstock.worker.cli", *arguments.rest])


COMMAND = Command("worker", "Start, list, drain and stop engines.", run=_run, forwards_arguments=True)
