"""Share of the time in which a GPU computes; else it waits for the host, or between two kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


class DeviceActivity:
    """Records, while entered, when kernels and copies run; nothing without a GPU, or unless ``is_enabled``.

    The recorder costs the host some microseconds per launch, so the measured share is a little too low.
    """

    def __init__(self, *, is_enabled: bool) -> None:
        self.busy_share: float | None = None
        can_record = is_enabled and torch.cuda.is_available()
        self._profile = profile(activities=[ProfilerActivity.CUDA]) if can_record else None

    def __enter__(self) -> DeviceActivity:
        if self._profile is not None:
            self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profile is None:
            return
        torch.cuda.synchronize()
        self._profile.__exit__(*error)
        events = self._profile.events() or []
        self.busy_share = covered_share(
            (event.time_range.start, event.time_range.end)
            for event in events
            # Skip annotated ranges, because they also cover the time between their kernels.
            if event.device_type.name == "CUDA" and not event.is_user_annotation
        )


def covered_share(intervals: Iterable[tuple[float, float]]) -> float | None:
    """Return the share of the time from the first start to the last end that intervals cover; None without any."""
    ordered = sorted(intervals)
    if not ordered:
        return None
    begin = last_end = ordered[0][0]
    covered = 0.0
    for start, end in ordered:
        covered += max(0.0, end - max(start, last_end))
        last_end = max(last_end, end)
    return covered / (last_end - begin) if last_end > begin else None
