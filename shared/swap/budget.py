"""Memory of a device with several models: which models fit, which must leave, and how deep each sleeps.

Pure. Two conditions hold:

    awake models + the rest that sleeping processes keep <= budget of the device
    weights of models that sleep in host memory <= budget of the host
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from .views import DeviceView, ModelView, SleepLevel

# Waking a process without weights must be this much faster than starting one, or else the process ends.
MAX_PROCESS_WAKE = 0.7


@dataclass(frozen=True, slots=True)
class Departures:
    """Models that must leave so that another fits: those that go to sleep, and sleepers whose processes end."""

    asleep: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


def device_bytes(models: Collection[ModelView]) -> int:
    """Return the bytes of the device that models take at their levels."""
    return sum(_bytes_of(model) for model in models)


def fits_alone(device: DeviceView, model: ModelView, models: Collection[ModelView]) -> bool:
    """Return whether a model fits beside the pinned models, with no other process."""
    others = sum(other.memory.awake for other in models if other.is_pinned and other.name != model.name)
    return others + model.memory.awake <= device.memory


def departures(device: DeviceView, models: Sequence[ModelView], entering: ModelView) -> Departures | None:
    """Return which models must leave so that a model fits; None if it never fits.

    Models without work leave first, the least recently used one before others. Of working ones those leave first that
    are awake on another device, too, then the one that has been awake longest. Sleeping processes end only if that
    does not suffice.
    """
    others = [model for model in models if model.name != entering.name]
    used = device_bytes(others) + entering.memory.awake
    leaving: list[str] = []
    ended: list[str] = []
    awake = [model for model in others if model.is_awake and not model.is_pinned]
    awake.sort(key=_leaves_after)
    for model in awake:
        if used <= device.memory:
            break
        leaving.append(model.name)
        used -= model.memory.awake - model.memory.asleep
    asleep = [replace(model, level=SleepLevel.PROCESS) if model.name in leaving else model for model in others]
    for model in sorted(asleep, key=lambda model: (model.used_s, model.name)):
        if used <= device.memory:
            break
        if not model.is_awake and model.level is not SleepLevel.DISK and not model.is_pinned:
            ended.append(model.name)
            used -= model.memory.asleep
    return Departures(tuple(leaving), tuple(ended)) if used <= device.memory else None


def sleep_level(device: DeviceView, models: Collection[ModelView], leaving: ModelView) -> SleepLevel:
    """Return the level for a model that leaves: its weights in host memory while it has room, else deeper.

    A process without weights is kept only if it wakes in less than ``MAX_PROCESS_WAKE`` of the time from disk.
    """
    used = sum(
        model.memory.weights for model in models if model.level is SleepLevel.HOST_MEMORY and model.name != leaving.name
    )
    if used + leaving.memory.weights <= device.host_memory:
        return SleepLevel.HOST_MEMORY
    wakes_s = leaving.wake_s_of
    if SleepLevel.PROCESS not in wakes_s or SleepLevel.DISK not in wakes_s:
        return SleepLevel.PROCESS
    pays = wakes_s[SleepLevel.PROCESS] < MAX_PROCESS_WAKE * wakes_s[SleepLevel.DISK]
    return SleepLevel.PROCESS if pays else SleepLevel.DISK


def _leaves_after(model: ModelView) -> tuple[bool, bool, float, str]:
    if not model.has_work:
        return (False, False, model.used_s, model.name)
    return (True, not model.is_elsewhere, model.since_s, model.name)


def _bytes_of(model: ModelView) -> int:
    if model.is_awake:
        return model.memory.awake
    return 0 if model.level is SleepLevel.DISK else model.memory.asleep
