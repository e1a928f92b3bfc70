"""Where the scheduler asks for guesses at the next tokens of requests; ``engine/drafting`` makes them."""

from __future__ import annotations

from typing import Protocol

from .blocks.block_tables import BlockTables
from .request import Request
from .scheduler_output import SchedulerOutput

# So much longer than a step of one row one with guesses may take: rows beyond that are not free.
STEP_COST = 0.25


class Guessing(Protocol):
    """Adds guesses to a step whose work has been chosen.

    Attributes:
        num_draft_tokens: how many guesses were computed since the start.
        num_accepted_tokens: how many of them turned out to be tokens of their requests.
        num_free_rows: tokens of a step that cost little more than one; 0 where nothing is guessed.
    """

    num_free_rows: int
    num_draft_tokens: int
    num_accepted_tokens: int

    def extend(self, output: SchedulerOutput, tables: BlockTables) -> None:
        """Give requests of ``output`` guesses, and blocks for them, if they want any."""
        ...

    def judged(self, request: Request, num_guessed: int, num_accepted: int) -> None:
        """Note that of ``num_guessed`` guesses, which a step computed for ``request``, so many came true."""
        ...

    def forget(self) -> None:
        """Forget what requests that have ended said."""
        ...


class NoGuessing:
    """The ``Guessing`` of an engine that computes what is known, and no more."""

    num_free_rows = 0
    num_draft_tokens = 0
    num_accepted_tokens = 0

    def extend(self, output: SchedulerOutput, tables: BlockTables) -> None:
        """None wants any."""

    def judged(self, request: Request, num_guessed: int, num_accepted: int) -> None:
        """There were none."""

    def forget(self) -> None:
        """Nothing is known."""
