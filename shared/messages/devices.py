"""Record of a device that several models share: what its supervisor writes about it, for lists, metrics and pages.

JSON in Redis, renewed once a second under a time to live. New fields are only appended and have a default.
"""

from __future__ import annotations

import enum

import msgspec

from ..stats import Histogram
from ..swap.rule import Reason
from ..swap.views import SleepLevel
from . import WIRE_VERSION

# Upper bounds of the seconds that a model takes to wake, or to go to sleep.
SWAP_TIME_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ModelPhase(enum.StrEnum):
    """Phase of a model on a device, in the words of lists."""

    AWAKE = "awake"
    WAKING = "waking"
    FALLING_ASLEEP = "to sleep"
    ASLEEP = "asleep"
    ON_DISK = "on disk"
    BROKEN = "broken"


class DeviceModel(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A model of a device.

    Args:
        phase: one of ``ModelPhase``, or one of a newer version.
        level: depth of its sleep, as ``SleepLevel``.
        engine_id: id of its engine; it has a heartbeat while it has a process.
        awake_bytes, asleep_bytes: bytes of the device that it takes awake, and that its process keeps while it sleeps.
        weight_bytes: bytes of the host that its weights take while it sleeps at level 1.
        lateness: 1 from when a working model may have to leave for it; 0 while it is awake.
        standing_s: how long its oldest request has waited without the device.
        wake_s: time to wake it from its level.
        is_pinned: whether it never leaves the device.
        is_kept_asleep: whether an operator put it to sleep, so that only an operator wakes it.
        error: why it is broken, or why its last wake failed; empty if that succeeded.
        retry_at: Unix time of the next attempt after a failure; 0 without one.
        wake_failures: number of failed wakes, by cause.
        num_recomputed_tokens: tokens of running requests that swaps had computed again.
        wakes, sleeps: seconds of its swaps, by level as text.
        num_refusals: number of refused commands of operators.
        refusal: why the last one was refused.
    """

    name: str
    phase: str
    level: int = SleepLevel.DISK
    engine_id: str = ""
    awake_bytes: int = 0
    asleep_bytes: int = 0
    weight_bytes: int = 0
    lateness: float = 0.0
    standing_s: float = 0.0
    wake_s: float = 0.0
    is_pinned: bool = False
    is_kept_asleep: bool = False
    error: str = ""
    retry_at: float = 0.0
    wake_failures: dict[str, int] = {}
    num_recomputed_tokens: int = 0
    wakes: dict[str, Histogram] = {}
    sleeps: dict[str, Histogram] = {}
    num_refusals: int = 0
    refusal: str = ""

    @property
    def phase_words(self) -> str:
        """Its phase for people, with the level of a sleeping process: "asleep 1"."""
        return f"{self.phase} {self.level}" if self.phase == ModelPhase.ASLEEP else self.phase

    @property
    def device_bytes(self) -> int:
        """Bytes of the device that it takes now, by its level."""
        if self.level == SleepLevel.AWAKE:
            return self.awake_bytes
        return 0 if self.level == SleepLevel.DISK else self.asleep_bytes


class SwapRecord(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The last swap of a device.

    Args:
        at: Unix time of its end.
        left: models that went to sleep, or whose processes ended.
        entered: model that woke; empty if none did.
        reason: one of ``Reason``, or one of a newer version.
        took_s: from the decision until the model served.
        num_handed_back: running requests that returned to the queue.
    """

    at: float
    left: list[str] = []
    entered: str = ""
    reason: str = Reason.EMPTY
    took_s: float = 0.0
    num_handed_back: int = 0


class SwapCount(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Number of swaps between two models since the supervisor started; ``left`` or ``entered`` is empty for none."""

    left: str = ""
    entered: str = ""
    reason: str = Reason.EMPTY
    count: int = 0


class DeviceRecord(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A device that several models share.

    Args:
        device_id: worker and device, the device's name among the homes of its models.
        device: its name on the host: "cpu" or "cuda:0".
        reported_at: Unix time of this record.
        budget_bytes: memory of the device that all its models may take together.
        host_budget_bytes: memory of the host for weights of models that sleep at level 1.
        debt_s: seconds of swaps that are not repaid yet; below 0 for credit.
        swap_share: share of the last ten minutes that swaps took.
        last_swap: None before the first.
    """

    version: int = WIRE_VERSION
    device_id: str
    worker_id: str
    host: str
    device: str
    reported_at: float = 0.0
    budget_bytes: int = 0
    host_budget_bytes: int = 0
    models: list[DeviceModel] = []
    debt_s: float = 0.0
    swap_share: float = 0.0
    last_swap: SwapRecord | None = None
    swap_counts: list[SwapCount] = []
