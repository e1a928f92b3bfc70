"""``penstock quality``: what a number format costs a model in quality."""

from __future__ import annotations

from functools import partial

from ....shared.process.command_line import Command
from .worker import run_module

COMMAND = Command(
    "quality",
    "Measure what a quantization costs a model.",
    run=partial(run_module, "penstock.worker.engine.offline.quality"),
    forwards_arguments=True,
)
