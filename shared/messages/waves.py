"""Messages of data-parallel ranks about their waves: to their worker process, and through Redis to each other.

A *wave* is the time in which the ranks of a group step together. It is numbered, and all ranks begin and end it at the
same collective (``worker/data_parallel/wave.py``). Groups have generations, which Redis counts
(``shared/deployment/groups``).
"""

from __future__ import annotations

import enum

import msgspec


class WavePhase(enum.StrEnum):
    """Where a rank is. STARTING: it has begun a wave, and does not know yet that the others are in it."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    LEFT = "left"


class WaveState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of a rank, in the statistics of its scheduler; ``wave`` is the one that runs, or the next one."""

    wave: int
    phase: WavePhase


class StartWave(msgspec.Struct, array_like=True, tag="start_wave"):
    """To an engine core: another rank of its group has begun this wave. One that is over is ignored."""

    wave: int


class LeaveWave(msgspec.Struct, array_like=True, tag="leave_wave"):
    """To an engine core: have all ranks of the group leave at their next meeting, for another generation of it."""


class WaveStarted(msgspec.Struct, array_like=True, frozen=True):
    """On the channel of a group: a rank of this generation has begun a wave. It is said again until all are in it."""

    generation: int
    wave: int


class GroupStanding(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine's place in a data-parallel group, in its heartbeat; requests that run and wait stand there already."""

    group: str
    generation: int
    rank: int
    size: int
    wave: int = 0
    phase: WavePhase = WavePhase.IDLE
