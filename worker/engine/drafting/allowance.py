"""Budget for rejected draft tokens, so that an unpredictable text takes at most 2 % longer.

The unit is the time of a step without draft tokens. A request may lose ``FULL``, and ``REFILL`` for each of its tokens:
for 100 tokens or more that is at most 2 %. An accepted draft token has saved a step, which is added to the balance.
"""

from __future__ import annotations

from ..scheduling.drafting import STEP_COST

FULL = 1.0
REFILL = 0.01
# Limit for a request's first step. Low, since the quality of drafts is unknown; it rises fast if they are accepted.
FIRST_LIMIT = 2


class Allowance:
    """Limits the draft tokens of one request by how many were accepted so far.

    Args:
        max_draft_tokens: limit per step.
        num_tokens: current number of the request's tokens.
    """

    def __init__(self, max_draft_tokens: int, num_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._limit = min(FIRST_LIMIT, max_draft_tokens)
        self._balance = FULL
        self._num_tokens = num_tokens

    def room(self, num_tokens: int) -> int:
        """Return how many draft tokens may follow the request's ``num_tokens`` tokens; 0 while it can afford none."""
        self._balance = min(FULL, self._balance + REFILL * (num_tokens - self._num_tokens))
        self._num_tokens = num_tokens
        return self._limit if self._balance >= STEP_COST else 0

    def judge(self, num_drafts: int, num_right: int) -> None:
        """Record a step with drafts: the next limit is one more than were accepted, or doubles if all were."""
        self._balance = min(FULL, self._balance - STEP_COST + num_right)
        if num_right >= num_drafts:
            self._limit = min(2 * self._limit, self._max_draft_tokens)
        elif num_right > 0:
            self._limit = min(num_right + 1, self._max_draft_tokens)
        else:
            self._limit = max(1, self._limit // 2)
