"""``penstock worker ...`` and ``penstock quality``: programs of the worker, for systems without them on the PATH."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

from ....shared.process.command_line import Command


def run_module(module: str, arguments: argparse.Namespace) -> int:
    """Replace this process by ``python -m module`` with the rest of the command line."""
    # exec keeps signals and terminal, and this package need not import the worker's.
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments.rest])


WORKER = Command(
    "worker",
    "Start, list, drain and stop engines.",
    run=partial(run_module, "penstock.worker.cli"),
    forwards_arguments=True,
)


QUALITY = Command(
    "quality",
    "Measure what a quantization costs a model.",
    run=partial(run_module, "penstock.worker.engine.offline.quality"),
    forwards_arguments=True,
)
