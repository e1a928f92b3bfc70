"""How long a request waits for its next token after its engine has died."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

# Tokens in flight through worker and Redis when an engine is killed are no sign of recovery.
IN_FLIGHT_S = 0.025


class RecoveryClock:
    """Times from the death of an engine to the next token of each request that it held."""

    def __init__(self) -> None:
        self._deaths: dict[str, list[float]] = defaultdict(list)
        self.recoveries_s: list[float] = []

    @property
    def num_waiting(self) -> int:
        """Number of requests without a token since the death of their engine."""
        return len(self._deaths)

    def died(self, request_ids: Iterable[str]) -> None:
        """Record that the engine of these requests has been killed now."""
        now = time.monotonic()
        for request_id in request_ids:
            self._deaths[request_id].append(now)

    def saw(self, request_id: str) -> None:
        """Record that a subscriber received a delta of this request."""
        if request_id not in self._deaths:
            return
        now = time.monotonic()
        if now - self._deaths[request_id][-1] > IN_FLIGHT_S:
            self.recoveries_s += [now - died_at for died_at in self._deaths.pop(request_id)]

    def ended(self, request_id: str) -> None:
        """Forget a request whose last delta was in flight when its engine died: no other one follows."""
        self._deaths.pop(request_id, None)
