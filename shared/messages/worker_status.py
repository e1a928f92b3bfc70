"""What a worker process says to its supervisor."""

from __future__ import annotations

import enum

import msgspec

from . import WIRE_VERSION


class EngineState(enum.StrEnum):
    """What an engine is doing. The last two are said by a worker process of itself as it ends."""

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


class WorkerStatus(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A line of JSON that a worker process writes to its standard output: at every change of state, and once a second
    while it lives, so that its silence says something.

    ``is_external`` says of a failure that it came from outside (a signal sent to the core), ``num_tokens`` how many
    tokens the engine has generated in this life: a restart that got no further than the one before counts as a loop.
    ``heartbeat`` is an ``EngineHeartbeat``, not in every line: the supervisor knows by it while Redis is away.
    ``weights_folder`` is that of weights which were put in place of the configured ones, for the next life to begin
    with, and ``weights_version`` what they are called; empty while there are none.
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
