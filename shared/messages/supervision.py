"""Commands of the broker and of operators to workers, and the status that a worker process reports."""

from __future__ import annotations

import enum

import msgspec

from ..control.calls import CallError, ControlCommand
from ..control.engine import Sleep, SleepState, WakeUp
from . import WIRE_VERSION


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


class ModelAction(enum.StrEnum):
    """Action of an operator on a model of a device that several models share."""

    # Wake it, also if it is broken, and end what ``UNLOAD`` began.
    LOAD = "load"
    # Put it to sleep until ``LOAD``.
    UNLOAD = "unload"
    # Never let it leave the device again, and wake it.
    PIN = "pin"
    UNPIN = "unpin"


class ModelCommand(msgspec.Struct, array_like=True, tag="model"):
    """Load, unload, pin or unpin a model on each device of the worker that has it. The device records show it done."""

    model: str
    action: ModelAction


EngineCommand = CancelCommand | ControlCommand
WorkerCommand = DrainCommand | StopCommand | ScaleCommand | ModelCommand


class EngineState(enum.StrEnum):
    """State of an engine. A worker process reports the last two itself as it ends."""

    STARTING = "starting"
    COMPILING = "compiling"
    READY = "ready"
    BUSY = "busy"
    STALLED = "stalled"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    DEAD = "dead"
    STOPPED = "stopped"
    FAILED = "failed"


class SleepOrder(msgspec.Struct, kw_only=True):
    """A line of JSON that a supervisor writes to a worker process's standard input, after the configuration.

    It works while Redis is away, and takes its turn among the calls that arrive through Redis.
    """

    order_id: int
    call: Sleep | WakeUp


class SleepOrderDone(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The outcome of a ``SleepOrder``: the state of the engine, or the error of a call that failed."""

    order_id: int
    state: SleepState | None = None
    error: CallError | None = None


class Activation(msgspec.Struct, kw_only=True):
    """The first line after the configuration for a process on standby: from now on it serves the engine.

    Args:
        num_restarts: number of restarts of the engine, including this one.
    """

    num_restarts: int


# Codes of processes that were killed because they made no progress.
STALLED, LOAD_TIMED_OUT = "engine_stalled", "load_timed_out"


class WorkerStatus(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A line of JSON that a worker process writes to its standard output: at every change of state, and once a second
    while it is alive, so that a missing line is a sign.

    ``is_external``: a failure came from outside (a signal sent to the core). ``num_tokens`` is the number of tokens the
    engine has generated in this process: a restart that got no further than the last one counts as a loop.
    ``heartbeat`` is an ``EngineHeartbeat``, not in every line, for the supervisor while Redis is unavailable.
    ``weights_folder`` is that of weights which were put in place of the configured ones, for the next life to begin
    with, and ``weights_version`` what they are called; empty while there are none. ``sleep_level`` is that at
    which the next process sleeps if this one dies; 0 for an engine that is awake. ``done`` is the outcome of an order.
    For an engine of a device that several models share, ``num_wishes`` counts operators' calls to wake it up, and
    ``is_held`` says that an operator put it to sleep and did not wake it since.
    """

    version: int = WIRE_VERSION
    engine_id: str
    state: EngineState
    code: str = ""
    message: str = ""
    trace: str = ""
    is_external: bool = False
    num_tokens: int = 0
    heartbeat: msgspec.Raw = msgspec.Raw()
    weights_folder: str = ""
    weights_version: str = ""
    sleep_level: int = 0
    done: SleepOrderDone | None = None
    num_wishes: int = 0
    is_held: bool = False
