"""Guesses at text that a grammar leaves no choice about."""

from __future__ import annotations

from ..scheduling.constraint import Constraint
from ..scheduling.request import Request


class ForcedTextDrafter:
    """The ``drafter.Drafter`` over a request's grammar. How the model cuts the text into tokens remains a guess."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def draft(self, request: Request, room: int) -> list[int]:
        return self._constraint.forced_tokens(room)
