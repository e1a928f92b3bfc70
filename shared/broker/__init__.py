"""The broker: the state of every request, changed only by atomic scripts inside Redis.

The scripts are in ``scripts/``, one file per change of state. This package is their Python interface, for clients and
workers. Each call is one round trip. The server decides about fencing, admission and claims, because a caller that
checked first and wrote afterwards would race with others.
"""

from ..redis_access.script import Script
from .admission import LEFT, NEW, RELAID, UNSERVED, Entry
from .broker import (
    IDLE_POLL_S,
    LEASE_TTL_MS,
    REAP_INTERVAL_S,
    SEQS_PER_KEPT_ONE,
    Broker,
    Claim,
    EngineCapacity,
    ReapResult,
    Wave,
)
from .dead_letter import DeadLetter
from .engine_calls import EngineCalls
from .homes import Demand, Grant, GrantReply, Home, Homes
from .input import MAX_CHUNKS, MAX_INPUT_BYTES, RequestInput
from .queue import Queue
from .request_history import STATE_WORDS, RequestFilter, RequestHistory
from .script import SCRIPTS
from .writes import FinalRecord, Record, SegmentRecord

__all__ = [
    "IDLE_POLL_S",
    "LEASE_TTL_MS",
    "LEFT",
    "MAX_CHUNKS",
    "MAX_INPUT_BYTES",
    "NEW",
    "REAP_INTERVAL_S",
    "RELAID",
    "SCRIPTS",
    "SEQS_PER_KEPT_ONE",
    "STATE_WORDS",
    "UNSERVED",
    "Broker",
    "Claim",
    "DeadLetter",
    "Demand",
    "EngineCalls",
    "EngineCapacity",
    "Entry",
    "FinalRecord",
    "Grant",
    "GrantReply",
    "Home",
    "Homes",
    "Queue",
    "ReapResult",
    "Record",
    "RequestFilter",
    "RequestHistory",
    "RequestInput",
    "Script",
    "SegmentRecord",
    "Wave",
]
