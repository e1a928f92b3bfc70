"""Calls that diagnose an engine: its invariants, profiles, one step; under the rules of ``calls``."""

from __future__ import annotations

import msgspec


class CheckInvariants(msgspec.Struct, array_like=True, tag="check_invariants"):
    """Verify the block pool and the scheduler. Answer: ``Invariants``."""


class Invariants(msgspec.Struct, array_like=True, tag="invariants"):
    """All invariants hold, with this number of blocks and requests."""

    num_free_blocks: int
    num_blocks: int
    num_running_reqs: int
    num_waiting_reqs: int


class StartProfile(msgspec.Struct, array_like=True, tag="start_profile"):
    """Start torch's profiler. Answer: ``ProfileStarted``."""


class ProfileStarted(msgspec.Struct, array_like=True, tag="profile_started"):
    """``folder``, on the engine's host, is where the trace will be."""

    folder: str


class StopProfile(msgspec.Struct, array_like=True, tag="stop_profile"):
    """Write the recorded profile to a file. Answer: ``ProfileSaved``."""


class ProfileSaved(msgspec.Struct, array_like=True, tag="profile_saved"):
    """``path``, on the engine's host, holds a trace for chrome://tracing and Perfetto."""

    path: str
    num_bytes: int


class ExecuteDummyBatch(msgspec.Struct, array_like=True, tag="execute_dummy_batch"):
    """Run one token of no request through the model, without storing it. Answer: ``DummyBatchDone``."""


class DummyBatchDone(msgspec.Struct, array_like=True, tag="dummy_batch_done"):
    """The forward took ``time_s``."""

    time_s: float
