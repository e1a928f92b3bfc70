"""What makes guesses for one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..scheduling.request import Request
from .forced import ForcedTextDrafter
from .ngram import NgramDrafter
from .predicted import PredictionDrafter


class Drafter(Protocol):
    """Belongs to one request, and may keep what it has read of it."""

    def draft(self, request: Request, room: int) -> list[int]:
        """Return at most ``room`` tokens, at least 1, that ``request`` may say next; none if it has no guess."""
        ...


MakeDrafters = Callable[[Request], Sequence[Drafter]]


def make_drafters(request: Request) -> list[Drafter]:
    """Return what drafts for ``request``: who comes first is asked first, since it is more often right."""
    drafters: list[Drafter] = []
    if request.constraint is not None:
        drafters.append(ForcedTextDrafter(request.constraint))
    if request.prediction:
        drafters.append(PredictionDrafter(request.prediction))
    return [*drafters, NgramDrafter(request)]
