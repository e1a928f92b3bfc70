"""Interface of objects that guess the next tokens of one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..scheduling.request import Request
from .forced import ForcedTextDrafter
from .ngram import NgramDrafter
from .predicted import PredictionDrafter


class Drafter(Protocol):
    """Guesses the next tokens of one request. It may keep state about that request."""

    def draft(self, request: Request, room: int) -> list[int]:
        """Return at most ``room`` draft tokens for ``request``, an empty list if there is no guess; ``room`` is at
        least 1.
        """
        ...


MakeDrafters = Callable[[Request], Sequence[Drafter]]


def make_drafters(request: Request) -> list[Drafter]:
    """Return the drafters of ``request``. Earlier ones are asked first, since they are correct more often."""
    drafters: list[Drafter] = []
    if request.constraint is not None:
        drafters.append(ForcedTextDrafter(request.constraint))
    if request.prediction:
        drafters.append(PredictionDrafter(request.prediction))
    return [*drafters, NgramDrafter(request)]
