"""Guesses that a request goes on as it, or its prompt, has gone on before."""

from __future__ import annotations

from ...suffix_index import SuffixIndex
from ..scheduling.request import Request


class NgramDrafter:
    """The ``drafter.Drafter`` over one request's own tokens: what followed the last time that its end was said."""

    def __init__(self, request: Request) -> None:
        self._index = SuffixIndex(request.token_ids)

    def draft(self, request: Request, room: int) -> list[int]:
        token_ids = request.token_ids
        start = self._index.find(token_ids)
        if start is None:
            return []
        return continued(token_ids, start, room)


def continued(token_ids: list[int], start: int, room: int) -> list[int]:
    """Return the ``room`` tokens from ``start`` on. What repeats itself up to the end is taken to go on doing so."""
    found = token_ids[start : start + room]
    while len(found) < room:
        found += found[: room - len(found)]
    return found
