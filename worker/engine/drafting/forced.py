"""Guesses at text that a grammar leaves no choice about."""

from __future__ import annotations

from ..scheduling.request import Request


class ForcedTextDrafter:
    """The ``drafter.Drafter`` over a request's grammar. How the model cuts the text into tokens remains a guess."""

    def draft(self, request: Request, room: int) -> list[int]:
        return [] if request.constraint is None else request.constraint.forced_tokens(room)
