"""Calls about the memory of an engine; under the rules of ``calls``."""

from __future__ import annotations

import msgspec

from ..errors import ValidationError
from ..values.shown import shown
from ..values.timeouts import check_timeout

SLEEP_LEVELS = (1, 2)
SLEEP_MODES = ("keep", "wait", "abort")
WEIGHTS, KV_CACHE = SLEEP_TAGS = ("weights", "kv_cache")


class Sleep(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, tag="sleep"):
    """Release the device's memory, if it is not released. Answer: ``SleepState``.

    Args:
        level: 1 frees the KV cache and moves the weights into host memory (where a CPU engine already has them);
            2 frees the KV cache and discards the weights, which are loaded from their folder again at ``WakeUp``.
        mode: for running requests: "keep" queues them again, to resume after their last token here or
            elsewhere; "wait" lets them end, as long as ``drain_timeout_s``, and queues the rest again; "abort" ends
            them with finish_reason "abort".
    """

    level: int = 1
    mode: str = "keep"
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.level, bool) or self.level not in SLEEP_LEVELS:
            raise ValidationError(f"level must be 1 or 2, got {shown(self.level)}")
        if self.mode not in SLEEP_MODES:
            raise ValidationError(f"mode must be one of {', '.join(SLEEP_MODES)}, got {shown(self.mode)}")
        check_timeout("drain_timeout_s", self.drain_timeout_s)


class WakeUp(msgspec.Struct, array_like=True, omit_defaults=True, tag="wake_up"):
    """Restore everything, or what ``tags`` name; serve again once all is restored. Answer: ``SleepState``."""

    tags: list[str] | None = None

    def __post_init__(self) -> None:
        unknown = [tag for tag in self.tags or () if tag not in SLEEP_TAGS]
        if unknown or self.tags == []:
            raise ValidationError(
                f"tags must be some of {', '.join(SLEEP_TAGS)}, or None for all, got {shown(self.tags)}"
            )


class IsSleeping(msgspec.Struct, array_like=True, tag="is_sleeping"):
    """Report which parts sleep. Answer: ``SleepState``."""


class SleepState(msgspec.Struct, array_like=True, omit_defaults=True, tag="sleep_state"):
    """``level`` is 0 for an engine that is awake; ``tags`` name the parts that sleep."""

    level: int = 0
    tags: list[str] = []

    @property
    def is_sleeping(self) -> bool:
        return self.level > 0
