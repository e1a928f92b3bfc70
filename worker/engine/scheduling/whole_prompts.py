"""Scheduling for a model that computes a prompt in one step or not at all: one in which tokens see what follows them.

Nothing of a request outlives its step, so its blocks are numbers for which no memory is set aside, and nobody is
preempted. What limits a step is the budget of tokens alone.
"""

from __future__ import annotations

from .request import Request
from .scheduler import Scheduler
from .scheduler_output import SchedulerOutput


class WholePromptScheduler(Scheduler):
    """As ``Scheduler``; its budget holds at least one request of ``max_model_len``."""

    def _admit(self, request: Request, budget: int, output: SchedulerOutput) -> bool:
        """Not unless the budget holds all of it; the one that is first then waits for a step of its own."""
        return request.num_tokens <= budget and super()._admit(request, budget, output)
