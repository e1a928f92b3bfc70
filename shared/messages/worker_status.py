"""Messages of a worker process to its supervisor."""

from __future__ import annotations

import enum

import msgspec

from . import WIRE_VERSION


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


class WorkerStatus(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A line of JSON that a worker process writes to its standard output: at every change of state, and once a second
    while it is alive, so that a missing line is a sign.

    ``is_external``: a failure came from outside (a signal sent to the core). ``num_tokens`` is the number of tokens the
    engine has generated in this process: a restart that got no further than the last one counts as a loop.
    ``heartbeat`` is an ``EngineHeartbeat``, not in every line, for the supervisor while Redis is unavailable.
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
