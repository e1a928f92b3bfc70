"""Fills the free rows of a step with draft tokens.

A forward of a few rows takes hardly longer than one of a single row, because the weights are read once. The number of
such rows is measured when the engine is loaded (``execution/free_rows.py``). The tokens that a step computes anyway use
them first, and draft tokens share the rest. So with many running requests there are no draft tokens, and drafting costs
nothing. The cost of rejected draft tokens is bounded per request (``Allowance``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..scheduling.block_tables import BlockTables
from ..scheduling.drafting import STEP_COST
from ..scheduling.request import Request
from ..scheduling.scheduler_output import SchedulerOutput
from .drafters import Drafter, MakeDrafters, make_drafters

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


class _RequestDrafts:
    """Drafters and allowance of one request."""

    def __init__(self, request: Request, drafters: Sequence[Drafter], max_draft_tokens: int) -> None:
        self.request = request
        self._drafters = drafters
        self.allowance = Allowance(max_draft_tokens, request.num_tokens)

    def draft(self, room: int) -> list[int]:
        """Return at most ``room`` draft tokens; ``room`` is at least 1."""
        room = min(room, self.allowance.room(self.request.num_tokens))
        if room:
            for drafter in self._drafters:
                if drafts := drafter.draft(self.request, room):
                    return drafts
        return []


class Memory(Protocol):
    """State shared by the drafters of several requests."""

    def drafters_for(self, request: Request) -> Sequence[Drafter]:
        """Return the drafters of ``request``."""
        ...

    def observe(self, output: SchedulerOutput) -> None:
        """Observe a step before it is executed."""
        ...

    def forget_texts(self) -> None:
        """Forget the output of finished requests."""
        ...


class NoMemory:
    """A ``Memory`` without state: drafters use their own request only."""

    def __init__(self, make: MakeDrafters = make_drafters) -> None:
        self._make = make

    def drafters_for(self, request: Request) -> Sequence[Drafter]:
        """Return new drafters for ``request``."""
        return self._make(request)

    def observe(self, output: SchedulerOutput) -> None:
        """Do nothing."""

    def forget_texts(self) -> None:
        """Do nothing."""


class Speculation:
    """Implements ``scheduling.drafting.Drafting``.

    Args:
        max_draft_tokens: limit per request and step.
        num_free_rows: tokens of a step that cost little more than one.
        memory: creates the drafters of a request.
    """

    def __init__(self, max_draft_tokens: int, num_free_rows: int, memory: Memory | None = None) -> None:
        self._max_draft_tokens = max_draft_tokens
        self.num_free_rows = num_free_rows
        self._memory = memory or NoMemory()
        self._request_drafts: dict[str, _RequestDrafts] = {}
        self.num_draft_tokens = self.num_accepted_tokens = 0

    def extend(self, output: SchedulerOutput, tables: BlockTables) -> None:
        """Share the free rows equally among the decoding requests. See ``Drafting``."""
        self._memory.observe(output)
        for request_id in output.released_ids:
            self._request_drafts.pop(request_id, None)
        num_free = self.num_free_rows - sum(output.num_new_tokens)
        if num_free <= 0:
            return
        decoding = [place for place, request in enumerate(output.requests) if request.num_uncomputed_tokens == 1]
        for index, place in enumerate(decoding):
            request = output.requests[place]
            # Rounded up, so that the first requests get a row each if there are too few; unused rows go to the others.
            share = -(-num_free // (len(decoding) - index))
            room = min(share, request.max_output_tokens - request.num_output_tokens - 1)
            if room <= 0:
                continue
            drafts = self._drafts_of(request).draft(room)
            if drafts:
                num_reserved = len(output.requests) * tables.blocks_at_once
                drafts = drafts[: self._grow_for_drafts(request, len(drafts), num_reserved, tables)]
            if drafts:
                output.add_drafts(place, drafts)
                self.num_draft_tokens += len(drafts)
                num_free -= len(drafts)

    def record_accepted(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """See ``Drafting``."""
        self.num_accepted_tokens += num_accepted
        drafts = self._request_drafts.get(request.request_id)
        if drafts is not None:  # else the request has lost its blocks meanwhile
            drafts.allowance.judge(num_drafts, num_accepted)

    def forget_texts(self) -> None:
        """See ``Drafting``."""
        self._memory.forget_texts()

    def _drafts_of(self, request: Request) -> _RequestDrafts:
        drafts = self._request_drafts.get(request.request_id)
        # The id may belong to a new request, if the former one ended in a step that ``extend`` did not see.
        if drafts is None or drafts.request is not request:
            drafts = _RequestDrafts(request, self._memory.drafters_for(request), self._max_draft_tokens)
            self._request_drafts[request.request_id] = drafts
        return drafts

    @staticmethod
    def _grow_for_drafts(request: Request, num_drafts: int, num_reserved: int, tables: BlockTables) -> int:
        """Allocate blocks for ``num_drafts`` draft tokens; return how many of them fit into the KV cache.

        Blocks are allocated only while ``num_reserved`` stay free, as many as the running requests could need, so no
        request is preempted for a draft token.
        """
        num_blocks = tables.num_missing(request, request.num_tokens + num_drafts)
        if num_blocks > 0 and tables.pool.num_free - num_blocks >= num_reserved:
            tables.grow(request, request.num_tokens + num_drafts)
        return min(num_drafts, tables.token_capacity(request) - request.num_tokens)
