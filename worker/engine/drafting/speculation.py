"""Gives the guesses of drafters what a step has of free rows.

A forward of a few rows takes hardly longer than one of a single row: the weights are read once. How many that is was
measured when the engine was loaded (``execution/free_rows.py``). What the step computes anyhow takes of it first, and
guesses share the rest, so where many requests run there are none, and they cost nothing. What wrong guesses may cost a
request is bounded (``allowance.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..scheduling.blocks.block_tables import BlockTables
from ..scheduling.request import Request
from ..scheduling.scheduler_output import SchedulerOutput
from .allowance import Allowance
from .drafter import Drafter, MakeDrafters, make_drafters


class _Drafting:
    """What guesses for one request, and what that may still cost."""

    def __init__(self, request: Request, drafters: Sequence[Drafter], max_draft_tokens: int) -> None:
        self.request = request
        self._drafters = drafters
        self.allowance = Allowance(max_draft_tokens, request.num_tokens)

    def draft(self, room: int) -> list[int]:
        """Return at most ``room`` guesses, which is at least 1."""
        room = min(room, self.allowance.room(self.request.num_tokens))
        if room:
            for drafter in self._drafters:
                if found := drafter.draft(self.request, room):
                    return found
        return []


class Memory(Protocol):
    """What is known of requests beyond each of them alone."""

    def drafters_for(self, request: Request) -> Sequence[Drafter]:
        """Return what drafts for ``request``."""
        ...

    def observe(self, output: SchedulerOutput) -> None:
        """See a step before it is executed."""
        ...

    def forget(self) -> None:
        """Forget what requests have said."""
        ...


class NoMemory:
    """The ``Memory`` of what looks at each request alone."""

    def __init__(self, make: MakeDrafters = make_drafters) -> None:
        self._make = make

    def drafters_for(self, request: Request) -> Sequence[Drafter]:
        """Its own."""
        return self._make(request)

    def observe(self, output: SchedulerOutput) -> None:
        """It is not looked at."""

    def forget(self) -> None:
        """There is nothing."""


class Speculation:
    """See ``scheduling.guessing.Guessing``.

    Args:
        max_draft_tokens: of a request in a step.
        num_free_rows: tokens of a step that cost little more than one.
        memory: what drafts for a request.
    """

    def __init__(self, max_draft_tokens: int, num_free_rows: int, memory: Memory | None = None) -> None:
        self._max_draft_tokens = max_draft_tokens
        self.num_free_rows = num_free_rows
        self._memory = memory or NoMemory()
        self._draftings: dict[str, _Drafting] = {}
        self.num_draft_tokens = self.num_accepted_tokens = 0

    def extend(self, output: SchedulerOutput, tables: BlockTables) -> None:
        """See ``Guessing``. Of requests that decode, as many as there are, each gets its share of what is left."""
        self._memory.observe(output)
        for request_id in output.released_ids:
            self._draftings.pop(request_id, None)
        num_free = self.num_free_rows - sum(output.num_new_tokens)
        if num_free <= 0:
            return
        decoding = [place for place, request in enumerate(output.requests) if request.num_uncomputed_tokens == 1]
        for index, place in enumerate(decoding):
            request = output.requests[place]
            # Rounded up, so that the first have it where there is not one for each; what one leaves goes to the others.
            share = -(-num_free // (len(decoding) - index))
            room = min(share, request.max_output_tokens - request.num_output_tokens - 1)
            if room <= 0:
                continue
            guesses = self._drafting_of(request).draft(room)
            if guesses:
                num_kept_free = len(output.requests) * tables.blocks_at_once
                guesses = guesses[: self._room_in_blocks(request, len(guesses), num_kept_free, tables)]
            if guesses:
                output.guess(place, guesses)
                self.num_draft_tokens += len(guesses)
                num_free -= len(guesses)

    def judged(self, request: Request, num_guessed: int, num_accepted: int) -> None:
        """See ``Guessing``."""
        self.num_accepted_tokens += num_accepted
        drafting = self._draftings.get(request.request_id)
        if drafting is not None:  # else it has lost its blocks meanwhile
            drafting.allowance.judge(num_guessed, num_accepted)

    def forget(self) -> None:
        """See ``Guessing``."""
        self._memory.forget()

    def _drafting_of(self, request: Request) -> _Drafting:
        drafting = self._draftings.get(request.request_id)
        # An id may be another request's by now, if the end of the former was in a step that was not looked at.
        if drafting is None or drafting.request is not request:
            drafting = _Drafting(request, self._memory.drafters_for(request), self._max_draft_tokens)
            self._draftings[request.request_id] = drafting
        return drafting

    @staticmethod
    def _room_in_blocks(request: Request, wanted: int, num_kept_free: int, tables: BlockTables) -> int:
        """How many of ``wanted`` guesses have a place in the KV cache.

        Blocks are taken for them only while ``num_kept_free`` stay, what each running request could need: nobody is
        preempted for a guess.
        """
        num_blocks = tables.num_missing(request, request.num_tokens + wanted)
        if num_blocks > 0 and tables.pool.num_free - num_blocks >= num_kept_free:
            tables.grow(request, request.num_tokens + wanted)
        return min(wanted, tables.num_tokens_in(request) - request.num_tokens)
