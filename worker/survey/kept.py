"""Rows that were made already: a survey takes an hour, and goes on where it was stopped."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
import transformers

from .outcome import Outcome


class _Row(msgspec.Struct, kw_only=True):
    """One line of the file. Rows of other versions count for nothing."""

    versions: str
    options: str
    has_images: bool
    outcome: Outcome


class KeptOutcomes:
    """Those in a file of one JSON document a line.

    Args:
        path: None keeps nothing. The file need not exist.
        options: of the engines; rows of others count for nothing.
    """

    def __init__(self, path: Path | None, options: str = "") -> None:
        self._path = path
        self._options = options
        self._versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._known: dict[tuple[str, bool], Outcome] = {}
        lines = path.read_bytes().splitlines() if path is not None and path.is_file() else []
        for line in lines:
            try:
                row = msgspec.json.decode(line, type=_Row)
            except msgspec.DecodeError:  # the survey was stopped while it wrote
                continue
            if (row.versions, row.options) == (self._versions, options):
                self._known[row.outcome.model_type, row.has_images] = row.outcome

    def find(self, model_type: str, *, has_images: bool = False) -> Outcome | None:
        """What became of it; None if it was not tried."""
        return self._known.get((model_type, has_images))

    def forget(self) -> None:
        """The survey is through: the next one, of other code, begins anew."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def add(self, outcome: Outcome, *, has_images: bool = False) -> None:
        """Write it down."""
        self._known[outcome.model_type, has_images] = outcome
        if self._path is None:
            return
        row = _Row(versions=self._versions, options=self._options, has_images=has_images, outcome=outcome)
        with self._path.open("ab") as file:
            # A line of its own, also behind one that was cut off.
            file.write(b"\n" + msgspec.json.encode(row) + b"\n")
