"""Requests that an engine holds, and the work of its steps that follows from them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ...shared.broker import SEQS_PER_KEPT_ONE, EngineCapacity, FinalRecord, Record
from ...shared.messages.deltas import Delta
from ...shared.messages.outcome import FinishReason, Usage
from .measures import Note
from .scenario import Engines
from .speed import StepWork


@dataclass(slots=True)
class Running:
    """A request that an engine holds. ``num_left`` tokens must still be read: of the prompt, or of earlier output."""

    note: Note
    epoch: int
    num_left: int
    num_made: int
    num_logged: int
    num_kv_tokens: int
    alone_until: int
    partition: int = 0

    @property
    def is_decoding(self) -> bool:
        return self.num_left == 0

    @property
    def is_on_probation(self) -> bool:
        """Whether its engine must run it alone, because it may have killed its last engine."""
        return self.num_made < self.alone_until

    @property
    def num_context(self) -> int:
        """Tokens in the cache."""
        return max(0, self.note.num_prompt + self.num_made - self.num_left)

    def unlogged(self) -> Delta:
        """Return the tokens generated since the last append."""
        return Delta(index=self.num_logged, token_ids=[0] * (self.num_made - self.num_logged))

    def record(self) -> Record:
        """Return its record for an append."""
        return Record(self.note.request_id, self.epoch, self.unlogged())

    def final_record(self) -> FinalRecord:
        """Return its final record."""
        last = self.unlogged()
        last.finish_reason, last.usage = FinishReason.LENGTH, Usage(self.note.num_prompt, self.num_made)
        return FinalRecord(self.note.request_id, self.epoch, last)


def capacity_of(kind: Engines, running: Collection[Running]) -> EngineCapacity:
    """Return the capacity that an engine with these requests announces in a claim."""
    return EngineCapacity(
        max_num_seqs=kind.max_num_seqs,
        num_seqs=len(running),
        num_kv_tokens=kind.kv_tokens,
        num_held_kv_tokens=sum(one.num_kv_tokens for one in running),
        num_kept_seqs=kind.max_num_seqs // SEQS_PER_KEPT_ONE,
    )


def next_prompt_tokens(kind: Engines, running: Collection[Running]) -> list[tuple[Running, int]]:
    """Return the prompt tokens that the next step reads, by request, the oldest first."""
    budget = kind.max_step_tokens - sum(one.is_decoding for one in running)
    reading: list[tuple[Running, int]] = []
    for one in running:
        if one.num_left and budget > 0:
            reading.append((one, min(one.num_left, budget)))
            budget -= reading[-1][1]
    return reading


def step_work(reading: list[tuple[Running, int]], decoding: list[Running], num_steps: int = 1) -> StepWork:
    """Return the work of a step, averaged over ``num_steps``."""
    return StepWork(
        num_decoding=len(decoding),
        num_context_tokens=sum(one.num_context for one in decoding) + len(decoding) * (num_steps - 1) / 2,
        num_prompt_tokens=sum(num_tokens for _, num_tokens in reading),
        num_prompt_pairs=sum(num_tokens * (one.num_context + num_tokens // 2) for one, num_tokens in reading),
    )
