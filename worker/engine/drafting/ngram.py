"""Drafts that repeat an earlier continuation in the request's prompt or output."""

from __future__ import annotations

from ...suffix_index import SuffixIndex
from ..scheduling.request import Request


class NgramDrafter:
    """The ``drafter.Drafter`` that returns the tokens after the last occurrence of the request's latest tokens."""

    def __init__(self, request: Request) -> None:
        self._index = SuffixIndex(request.token_ids)

    def draft(self, request: Request, room: int) -> list[int]:
        token_ids = request.token_ids
        start = self._index.find(token_ids)
        if start is None:
            return []
        return continued(token_ids, start, room)


def continued(token_ids: list[int], start: int, room: int) -> list[int]:
    """Return ``room`` tokens from ``start`` on. A text that ends sooner is assumed to repeat itself."""
    tokens = token_ids[start : start + room]
    while len(tokens) < room:
        tokens += tokens[: room - len(tokens)]
    return tokens
