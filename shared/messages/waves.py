"""Messages of data-parallel ranks about their waves: to their worker process, and through Redis to each other.

A *wave* is the time in which the ranks of a group step together. It is numbered, and all ranks begin and end it at the
same collective (``worker/data_parallel/wave.py``). Groups have generations, which Redis counts
(``shared/deployment/groups``).
"""

from __future__ import annotations

import enum

import msgspec


class WavePhase(enum.StrEnum):
    """Phase of a rank. STARTING: it has begun a wave, and does not know yet whether the others have."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    LEFT = "left"


class WaveState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """State of a rank, in the statistics of its scheduler; ``wave`` is the current one, or the next one."""

    wave: int
    phase: WavePhase


class StartWave(msgspec.Struct, array_like=True, tag="start_wave"):
    """To an engine core: another rank of its group has begun this wave. One that is over is ignored."""

    wave: int


class LeaveWave(msgspec.Struct, array_like=True, tag="leave_wave"):
    """To an engine core: have all ranks of the group leave at their next meeting, for another generation of it."""


class WaveStarted(msgspec.Struct, array_like=True, frozen=True):
    """A rank of this generation has begun a wave. Sent on the group's channel until all ranks are in it."""

    generation: int
    wave: int


class GroupStanding(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine's rank in a data-parallel group, in its heartbeat, which already counts its requests."""

    group: str
    generation: int
    rank: int
    size: int
    wave: int = 0
    phase: WavePhase = WavePhase.IDLE
