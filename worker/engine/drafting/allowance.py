"""What wrong guesses may cost a request, so that a text that cannot be guessed takes at most 2 % longer.

The unit is the time of a step without guesses. A request may lose ``FULL``, and ``REFILL`` for each of its tokens: of
100 tokens and more that is at most 2 %, whatever they are. A right guess has saved a step, and gives it back.
"""

from __future__ import annotations

from ..scheduling.guessing import STEP_COST

FULL = 1.0
REFILL = 0.01
# Guesses of a request's first step. Nothing speaks for them yet, and where they are right there are soon more.
FIRST_LIMIT = 2


class Allowance:
    """How many tokens of one request may be guessed, by what has become of its guesses.

    Args:
        max_draft_tokens: of a step.
        num_tokens: that the request has.
    """

    def __init__(self, max_draft_tokens: int, num_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._limit = min(FIRST_LIMIT, max_draft_tokens)
        self._balance = FULL
        self._num_tokens = num_tokens

    def room(self, num_tokens: int) -> int:
        """How many guesses may follow the ``num_tokens`` that the request has now; 0 while it can afford none."""
        self._balance = min(FULL, self._balance + REFILL * (num_tokens - self._num_tokens))
        self._num_tokens = num_tokens
        return self._limit if self._balance >= STEP_COST else 0

    def judge(self, num_guessed: int, num_right: int) -> None:
        """Note a step with guesses: as many as were right are tried next, and one more; twice as many if all were."""
        self._balance = min(FULL, self._balance - STEP_COST + num_right)
        if num_right >= num_guessed:
            self._limit = min(2 * self._limit, self._max_draft_tokens)
        elif num_right > 0:
            self._limit = min(num_right + 1, self._max_draft_tokens)
        else:
            self._limit = max(1, self._limit // 2)
