"""Finds where the end of a sequence of tokens has been before."""

from __future__ import annotations

# Occurrences of the last two tokens that are compared, the latest first. More cost time, and seldom match longer.
MAX_CANDIDATES = 8
# Within one text a longer match is not looked for: what follows it is hardly more likely.
ENOUGH = 4
_NOWHERE = -1


class SuffixIndex:
    """Where each pair of neighbouring tokens of a growing list stands, the latest place first.

    As the hash chains of LZ77: a place for each pair, and for each place the one before it. A token costs an entry in a
    dictionary and one in a list.

    Args:
        token_ids: read when it is asked; it may have grown since, and nothing else.
        enough: a match of so many tokens ends the search.
    """

    def __init__(self, token_ids: list[int], enough: int = ENOUGH) -> None:
        self._token_ids = token_ids
        self._enough = enough
        # Of a pair the place of its second token, and by such a place that of the same pair before it.
        self._latest: dict[tuple[int, int], int] = {}
        self._earlier = [_NOWHERE]

    def find(self, tail: list[int]) -> int | None:
        """Return the place behind the longest match of the end of ``tail``; of equal ones the latest.

        None if the last two tokens of ``tail`` stand nowhere that a token follows. ``tail`` may be the list itself.
        """
        match = self.match(tail)
        return None if match is None else match[0]

    def match(self, tail: list[int]) -> tuple[int, int] | None:
        """As ``find``, with the length of the match: 2 to ``enough`` tokens."""
        self._catch_up()
        if len(tail) < 2:
            return None
        place = self._latest.get((tail[-2], tail[-1]), _NOWHERE)
        if place == len(self._token_ids) - 1:
            place = self._earlier[place]  # nothing follows it
        best, best_len = None, 0
        for _ in range(MAX_CANDIDATES):
            if place == _NOWHERE:
                break
            length = self._match_len(place, tail)
            if length > best_len:
                best, best_len = place + 1, length
            if best_len == self._enough:
                break
            place = self._earlier[place]
        return None if best is None else (best, best_len)

    def _catch_up(self) -> None:
        token_ids, latest, earlier = self._token_ids, self._latest, self._earlier
        for place in range(len(earlier), len(token_ids)):
            pair = token_ids[place - 1], token_ids[place]
            earlier.append(latest.get(pair, _NOWHERE))
            latest[pair] = place

    def _match_len(self, place: int, tail: list[int]) -> int:
        """Of the tokens up to ``place`` and the end of ``tail``, whose last two are equal."""
        token_ids, length = self._token_ids, 2
        while (
            length < self._enough
            and length <= place
            and length < len(tail)
            and token_ids[place - length] == tail[-1 - length]
        ):
            length += 1
        return length
