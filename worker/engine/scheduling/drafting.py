"""Interface through which the scheduler gets draft tokens for requests; implemented by ``engine/drafting``."""

from __future__ import annotations

from typing import Protocol

from .block_tables import BlockTables
from .request import Request
from .scheduler_output import SchedulerOutput

# A step with draft tokens may take this share longer than a step of one row; rows beyond that are not free.
STEP_COST = 0.25


class Drafting(Protocol):
    """Adds draft tokens to a step after its work has been chosen.

    Attributes:
        num_draft_tokens: draft tokens computed since the start.
        num_accepted_tokens: draft tokens that became tokens of their requests.
        num_free_rows: tokens of a step that cost little more than one; 0 without drafting.
    """

    num_free_rows: int
    num_draft_tokens: int
    num_accepted_tokens: int

    def extend(self, output: SchedulerOutput, tables: BlockTables) -> None:
        """Add draft tokens to requests of ``output``, and allocate blocks for them."""
        ...

    def record_accepted(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Record that ``num_accepted`` of the ``num_drafts`` draft tokens of ``request`` in a step were accepted."""
        ...

    def forget_texts(self) -> None:
        """Forget the output of finished requests."""
        ...


class NoDrafting:
    """The ``Drafting`` of an engine without draft tokens."""

    num_free_rows = 0
    num_draft_tokens = 0
    num_accepted_tokens = 0

    def extend(self, output: SchedulerOutput, tables: BlockTables) -> None:
        """Do nothing."""

    def record_accepted(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Do nothing."""

    def forget_texts(self) -> None:
        """Do nothing."""
