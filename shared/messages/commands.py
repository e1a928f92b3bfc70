"""Commands of the broker to a worker process, and of an operator to a supervisor."""

from __future__ import annotations

import msgspec

from ..control.calls import ControlCommand


class CancelCommand(msgspec.Struct, array_like=True, tag="cancel"):
    """The request was cancelled in Redis; its engine should stop computing it."""

    request_id: str


class DrainCommand(msgspec.Struct, array_like=True, tag="drain"):
    """Claim no new wave, finish running requests, then exit."""

    timeout_s: float | None = None


class StopCommand(msgspec.Struct, array_like=True, tag="stop"):
    """Release running requests and exit immediately."""


class ScaleCommand(msgspec.Struct, array_like=True, tag="scale"):
    """Serve with this many engines: start missing ones, drain the others."""

    num_engines: int


EngineCommand = CancelCommand | ControlCommand
WorkerCommand = DrainCommand | StopCommand | ScaleCommand
