"""What may be asked of an engine to look into it: its invariants, profiles, a step; under the rules of ``calls``."""

from __future__ import annotations

import msgspec


class CheckInvariants(msgspec.Struct, array_like=True, tag="check_invariants"):
    """Verify the block pool and the scheduler. Answer: ``Invariants``."""


class Invariants(msgspec.Struct, array_like=True, tag="invariants"):
    """All is as it should be, with so many blocks and requests."""

    num_free_blocks: int
    num_blocks: int
    num_running_reqs: int
    num_waiting_reqs: int


class StartProfile(msgspec.Struct, array_like=True, tag="start_profile"):
    """Record what torch does from now on. Answer: ``ProfileStarted``."""


class ProfileStarted(msgspec.Struct, array_like=True, tag="profile_started"):
    """``folder``, on the engine's host, is where the trace will be."""

    folder: str


class StopProfile(msgspec.Struct, array_like=True, tag="stop_profile"):
    """Write what was recorded to a file. Answer: ``ProfileSaved``."""


class ProfileSaved(msgspec.Struct, array_like=True, tag="profile_saved"):
    """``path``, on the engine's host, holds a trace for chrome://tracing and Perfetto."""

    path: str
    num_bytes: int


class ExecuteDummyBatch(msgspec.Struct, array_like=True, tag="execute_dummy_batch"):
    """Run one token through the model that belongs to no request and is stored nowhere. Answer: ``DummyBatchDone``."""


class DummyBatchDone(msgspec.Struct, array_like=True, tag="dummy_batch_done"):
    """The forward took ``time_s``."""

    time_s: float
