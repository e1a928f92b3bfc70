"""For which share of a time a GPU computed; the rest it waited for the host, or between two kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


class DeviceActivity:
    """Records, while entered, when kernels and copies run; nothing without a GPU, or unless ``is_wanted``.

    The recorder itself costs the host some microseconds per launch: the share is a little too low.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self.busy_share: float | None = None
        is_possible = is_wanted and torch.cuda.is_available()
        self._profile = profile(activities=[ProfilerActivity.CUDA]) if is_possible else None

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
            # A range that somebody named covers what lies between its kernels, too.
            if event.device_type.name == "CUDA" and not event.is_user_annotation
        )


def covered_share(intervals: Iterable[tuple[float, float]]) -> float | None:
    """How much of the time from the first beginning to the last end they cover; None without any."""
    ordered = sorted(intervals)
    if not ordered:
        return None
    begin = seen = ordered[0][0]
    covered = 0.0
    for start, end in ordered:
        covered += max(0.0, end - max(start, seen))
        seen = max(seen, end)
    return covered / (seen - begin) if seen > begin else None
