"""What a worker does while it loads a model, for someone who waits in a terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, TextIO

_START = "starting the engine"
# What follows an event of the worker's log.
_STEPS = {
    "core_started": "reading the file",
    "native_kernels_compiling": "compiling kernels for this processor",
    "native_kernels": "reading the weights",
    "forward_mode": "checking the results",
    "engine_ready": "nearly ready",
}
_MB = 1_000_000


def step_of(log: str) -> str:
    """Return the present step of a worker that has written ``log``, in words."""
    # The last line may not be whole yet.
    for line in reversed(log.split("\n")[:-1]):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        step = _step_after(event) if isinstance(event, Mapping) else None
        if step is not None:
            return step
    return _START


def _step_after(event: Mapping[str, Any]) -> str | None:
    name = event.get("event")
    if name == "model_downloading":
        return f"downloading, {event['num_bytes'] // _MB} of {event['total_bytes'] // _MB} MB"
    return _STEPS.get(str(name))


class LoadProgress:
    """Shows the steps of a load: in one line of a terminal with the seconds so far, else in a line for each step.

    Args:
        out: where it is shown.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._began = time.monotonic()
        self._shown = ""

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, log: str) -> None:
        """Show the step that ``log``, the worker's log so far, ends with."""
        line = f"{step_of(log)} …"
        if self._is_terminal:
            line += f" {time.monotonic() - self._began:.0f} s"
        if line != self._shown:
            self._shown = line
            self._out.write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")
            self._out.flush()

    def close(self) -> None:
        """Remove the line from the terminal."""
        if self._is_terminal and self._shown:
            self._out.write("\r\x1b[K")
            self._out.flush()
        self._shown = ""
