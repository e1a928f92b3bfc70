"""Scheduling for a model that computes a prompt in one step or not at all: one in which tokens see what follows them.

Nothing of a request outlives its step, so its blocks are numbers for which no memory is set aside, and nobody is
preempted. What limits a step is the budget of tokens alone. Where a processor gains nothing by more tokens, a step ends
with as many as are enough: while the next one is computed, its results are on their way, and who waits for them has
asked for more before the engine is without work.
"""

from __future__ import annotations

from typing import Any

from .request import Request
from .scheduler import Scheduler
from .scheduler_output import SchedulerOutput


class WholePromptScheduler(Scheduler):
    """As ``Scheduler``; its budget holds at least one request of ``max_model_len``.

    Args:
        enough_tokens: a step of which more are computed no sooner for it; None if there is no such number.
    """

    def __init__(self, enough_tokens: int | None, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._enough_tokens = enough_tokens

    def _admit(self, request: Request, budget: int, output: SchedulerOutput) -> bool:
        """Not unless the budget holds all of it; the one that is first then waits for a step of its own."""
        num_taken = self.max_num_batched_tokens - budget
        if self._enough_tokens is not None and num_taken > 0 and num_taken + request.num_tokens > self._enough_tokens:
            return False
        return request.num_tokens <= budget and super()._admit(request, budget, output)
