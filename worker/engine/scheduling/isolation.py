"""Finds the requests for which a batch raised, by executing them one by one."""

from __future__ import annotations

from collections import deque

from .request import Request, RequestStatus
from .scheduler_output import SchedulerOutput


class Isolation:
    """The requests of a failed batch that have not been tried alone yet.

    A failed step leaves nothing behind: tokens are counted when it succeeds, and slots of the KV cache may be written
    twice. So each request is given the same tokens to compute again, without guesses. Nothing may be scheduled before
    all are through, since what was given to one request assumes the blocks that it had.
    """

    def __init__(self) -> None:
        self._suspects: deque[tuple[Request, int]] = deque()
        self._released_ids: list[str] = []

    @property
    def is_active(self) -> bool:
        """Whether there is anybody to try."""
        return bool(self._suspects)

    def isolate(self, batch: SchedulerOutput) -> None:
        """Take apart a batch that failed."""
        self._suspects.extend(zip(batch.requests, batch.num_known_tokens(), strict=True))
        self._released_ids = self._released_ids + batch.released_ids

    def next_batch(self) -> SchedulerOutput | None:
        """The next request alone; None when all are through. Those that do not run any more are passed over."""
        while self._suspects:
            request, num_new_tokens = self._suspects.popleft()
            if request.status is RequestStatus.RUNNING:
                released_ids, self._released_ids = self._released_ids, []
                return SchedulerOutput([request], [num_new_tokens], released_ids)
        return None
