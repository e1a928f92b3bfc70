"""Finds the requests that made a batch raise, by executing them one by one."""

from __future__ import annotations

from collections import deque

from .request import Request, RequestStatus
from .scheduler_output import SchedulerOutput


class Isolation:
    """Requests of a failed batch that have not been tried separately yet.

    A failed step has no lasting effect: tokens are counted when it succeeds, and slots of the KV cache may be written
    twice. So each request computes the same tokens again, without draft tokens. Nothing may be scheduled before all
    have been tried, since the work of each request assumes the blocks that it had.
    """

    def __init__(self) -> None:
        self._suspects: deque[tuple[Request, int]] = deque()
        self._released_ids: list[str] = []

    @property
    def is_active(self) -> bool:
        """Whether requests are left to try."""
        return bool(self._suspects)

    def isolate(self, batch: SchedulerOutput) -> None:
        """Split a failed batch into single requests."""
        self._suspects.extend(zip(batch.requests, batch.num_known_tokens(), strict=True))
        self._released_ids = self._released_ids + batch.released_ids

    def next_batch(self) -> SchedulerOutput | None:
        """Return a batch of the next request; None when all have been tried. Skip requests that no longer run."""
        while self._suspects:
            request, num_new_tokens = self._suspects.popleft()
            if request.status is RequestStatus.RUNNING:
                released_ids, self._released_ids = self._released_ids, []
                return SchedulerOutput([request], [num_new_tokens], released_ids)
        return None
