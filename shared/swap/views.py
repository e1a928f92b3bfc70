"""The state of a device and its models that the rule decides from, and the options of an operator."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ..errors import ConfigurationError

_PATIENCE_S = {"interactive": 1.0, "standard": 5.0, "batch": 120.0}


class SleepLevel(enum.IntEnum):
    """Depth of a model's sleep. A deeper one gives back more memory, and takes longer to wake."""

    AWAKE = 0
    # Weights in host memory.
    HOST_MEMORY = 1
    # A process without weights.
    PROCESS = 2
    # No process.
    DISK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that a model takes.

    Args:
        awake: of the device, with its KV cache.
        asleep: of the device, which a sleeping process does not give back.
        weights: of the host, while it sleeps with its weights there.
    """

    awake: int = 0
    asleep: int = 0
    weights: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """A model of a device. Times are seconds of one clock.

    Args:
        since_s: when it woke, or was last put to sleep or died. Falling into a deeper sleep does not change it.
        oldest_s: arrival of its oldest waiting request, by band.
        num_running: requests that run on this device.
        deadline_s: earliest deadline of a waiting request.
        service_s: expected time from a request's start to its end.
        can_wake: False while it is paused, broken, backing off after a failure, or served well elsewhere.
        is_pinned: whether it is never put to sleep.
        is_elsewhere: whether it is awake on another device. Its requests then move there when it leaves this one.
        wake_s: time to wake it from its level.
        sleep_s: time to put it to sleep.
        relost_s: time to compute the cache of its running requests again.
        used_s: when it last had work.
        wake_s_of: time to wake from levels that were measured.
        stays_until_s: an operator loaded it: until then it counts as working, and leaves only for a model beyond its
            max_wait_s. 0 otherwise.
        own_options: its own patience_s and min_awake_s among the options of the device; None if it has none of its own.
    """

    name: str
    level: SleepLevel
    since_s: float
    oldest_s: Mapping[str, float] = field(default_factory=dict)
    num_running: int = 0
    deadline_s: float = math.inf
    service_s: float = 0.0
    can_wake: bool = True
    is_pinned: bool = False
    is_elsewhere: bool = False
    wake_s: float = 0.0
    sleep_s: float = 0.0
    relost_s: float = 0.0
    used_s: float = 0.0
    memory: Memory = Memory()
    wake_s_of: Mapping[SleepLevel, float] = field(default_factory=dict)
    stays_until_s: float = 0.0
    own_options: SwapOptions | None = None

    @property
    def is_awake(self) -> bool:
        return self.level is SleepLevel.AWAKE

    @property
    def has_requests(self) -> bool:
        """Whether requests wait or run."""
        return bool(self.oldest_s) or self.num_running > 0

    @property
    def has_work(self) -> bool:
        """Whether it has requests, or an operator has loaded it."""
        return self.has_requests or self.stays_until_s > 0

    @property
    def leave_s(self) -> float:
        """Time that leaving it costs."""
        return self.sleep_s + self.relost_s

    def standing_s(self, now_s: float) -> dict[str, float]:
        """Return by band how long the model has had waiting requests without the device.

        Its last turn counts as served, so the backlog of an overloaded model gives it no more than its turn.
        """
        if self.is_awake:
            return {}
        return {band: now_s - max(oldest_s, self.since_s) for band, oldest_s in self.oldest_s.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """A device: one GPU, or the CPU. Bytes are of the whole budget of its models."""

    memory: int = 1
    host_memory: int = 0


class SwapOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of an operator for a device with several models.

    Args:
        max_share: share of time that swaps away from working models may take, above 0 and at most 0.5.
        patience_s: by band, how long a model stands before a working model must leave for it; other bands 5.
        max_wait_s: by band, how long a model stands before it may exceed ``max_share``; other bands 60.
        min_awake_s: time for which a working model stays awake, unless another exceeds ``max_wait_s``.
        idle_sleep_s, idle_unload_s: time without work until a model sleeps, or its process ends; 0 for never.

    Raises:
        ConfigurationError: a value is out of range; the message names the field.
    """

    max_share: float = 0.2
    patience_s: dict[str, float] = {}
    max_wait_s: dict[str, float] = {}
    min_awake_s: float = 0.0
    idle_sleep_s: float = 0.0
    idle_unload_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.max_share <= 0.5:
            raise ConfigurationError(f"max_share must be above 0 and at most 0.5, got {self.max_share:g}")
        for name in ("min_awake_s", "idle_sleep_s", "idle_unload_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} must be a number from 0 on, got {getattr(self, name):g}")
        for name in ("patience_s", "max_wait_s"):
            for band, value in getattr(self, name).items():
                if not 0 < value < math.inf:
                    raise ConfigurationError(f"{name} of {band} must be a number above 0, got {value:g}")

    @property
    def stay_s(self) -> float:
        """Time for which a model stays that an operator has loaded: until it would sleep for lack of requests."""
        idle_s = [time_s for time_s in (self.idle_sleep_s, self.idle_unload_s) if time_s]
        return max(self.min_awake_s, min(idle_s, default=math.inf))

    def patience_of(self, band: str) -> float:
        """Return the patience of a band in seconds."""
        return self.patience_s.get(band, _PATIENCE_S.get(band, 5.0))

    def max_wait_of(self, band: str) -> float:
        """Return the maximum wait of a band in seconds."""
        return self.max_wait_s.get(band, 900.0 if band == "batch" else 60.0)
