"""What the broker says to a worker process, and an operator to a supervisor."""

from __future__ import annotations

import msgspec

from ..control.calls import ControlCommand


class CancelCommand(msgspec.Struct, array_like=True, tag="cancel"):
    """The request was cancelled in Redis; its engine should stop computing it."""

    request_id: str


class DrainCommand(msgspec.Struct, array_like=True, tag="drain"):
    """Take no new wave, finish what runs, then exit."""

    timeout_s: float | None = None


class StopCommand(msgspec.Struct, array_like=True, tag="stop"):
    """Hand back what runs and exit at once."""


class ScaleCommand(msgspec.Struct, array_like=True, tag="scale"):
    """Serve with so many engines: start those that lack, drain those beyond."""

    num_engines: int


EngineCommand = CancelCommand | ControlCommand
WorkerCommand = DrainCommand | StopCommand | ScaleCommand
