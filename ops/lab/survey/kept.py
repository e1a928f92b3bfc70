"""Outcomes so far by type, so that an interrupted survey can be resumed."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from .outcome import Outcome


class KeptOutcomes:
    """A file with a line for each outcome, after a header with versions and options. Another header starts it again.

    Args:
        path: path of the file; None to store nothing.
        options: fields of ``EngineConfig``.

    Attributes:
        found: outcomes by model type.
    """

    def __init__(self, path: Path | None, options: dict[str, Any]) -> None:
        self._path = path
        self.found: dict[str, Outcome] = {}
        if path is None:
            return
        versions = [transformers.__version__, str(torch.__version__), platform.python_version()]
        head = msgspec.json.encode([versions, sorted(options.items())])
        lines = path.read_bytes().split(b"\n") if path.is_file() else []
        if lines[:1] != [head]:
            path.write_bytes(head + b"\n")
            return
        # Text after the last newline was not written completely.
        for line in lines[1:-1]:
            outcome = msgspec.json.decode(line, type=Outcome)
            self.found[outcome.model_type] = outcome
        path.write_bytes(b"\n".join([*lines[:-1], b""]))

    def add(self, outcome: Outcome) -> None:
        """Keep one more."""
        self.found[outcome.model_type] = outcome
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(outcome) + b"\n")
