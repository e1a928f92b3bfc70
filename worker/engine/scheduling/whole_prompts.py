"""Scheduling for a model that computes a prompt in a single step, because its tokens attend to later tokens.

A request keeps no state after its step, so its blocks are numbers without memory, and no request is preempted. Only the
token budget limits a step. If more tokens make a step no more efficient, it ends at ``enough_tokens``: clients get its
results while the next step is computed, and send more requests before the engine runs out of work.
"""

from __future__ import annotations

from typing import Any

from .request import Request
from .scheduler import Scheduler
from .scheduler_output import SchedulerOutput


class WholePromptScheduler(Scheduler):
    """A ``Scheduler`` that admits whole prompts only. Its budget holds at least one request of ``max_model_len``.

    Args:
        enough_tokens: tokens of a step beyond which the throughput no longer rises; None if unlimited.
    """

    def __init__(self, enough_tokens: int | None, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._enough_tokens = enough_tokens

    def _admit(self, request: Request, budget: int, output: SchedulerOutput) -> bool:
        """Admit ``request`` if the budget holds all of it; else it waits, and is the first of a later step."""
        num_taken = self.max_num_batched_tokens - budget
        if self._enough_tokens is not None and num_taken > 0 and num_taken + request.num_tokens > self._enough_tokens:
            return False
        return request.num_tokens <= budget and super()._admit(request, budget, output)
