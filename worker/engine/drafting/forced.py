"""Drafts of text that a grammar determines."""

from __future__ import annotations

from ..scheduling.constraint import Constraint
from ..scheduling.request import Request


class ForcedTextDrafter:
    """The ``drafter.Drafter`` for text that a request's grammar forces. How the model tokenizes the text is a guess."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def draft(self, request: Request, room: int) -> list[int]:
        return self._constraint.forced_tokens(room)
