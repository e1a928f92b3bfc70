"""A reader's position in each answer of a stream; ``reconnect.py`` and the gateway encode it as an event's id."""

from __future__ import annotations

from ...shared.messages.deltas import Delta


class AnswerPositions:
    """The positions of one reader, by answer.

    Args:
        next_indexes: the index of the first token that the reader does not have.
        ended: whether the reader has the end.
    """

    def __init__(self, next_indexes: list[int], ended: list[bool]) -> None:
        self.next_indexes = next_indexes
        self.ended = ended

    def has(self, answer: int, delta: Delta) -> bool:
        """Return whether the reader already has ``delta``."""
        return self.ended[answer] or delta.index < self.next_indexes[answer]

    def advance(self, answer: int, delta: Delta) -> None:
        """Record that the reader receives ``delta``."""
        self.next_indexes[answer] = delta.next_index
        if delta.finished:
            self.ended[answer] = True
