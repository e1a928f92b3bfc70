"""Find earlier occurrences of the end of a token sequence."""

from __future__ import annotations

# Number of occurrences of the last two tokens that are compared, latest first. More cost time, and rarely match longer.
MAX_CANDIDATES = 8
# Length of a match that ends the search: tokens after a longer match in one text are hardly more likely.
ENOUGH = 4
_NOWHERE = -1


class SuffixIndex:
    """Positions of each pair of adjacent tokens of a growing list, latest first.

    Stored as the hash chains of LZ77: the latest position of each pair, and for each position the previous one of the
    same pair. A token costs an entry in a dictionary and one in a list.

    Args:
        token_ids: tokens; between calls the list may only grow.
        enough: number of matching tokens that ends the search.
    """

    def __init__(self, token_ids: list[int], enough: int = ENOUGH) -> None:
        self._token_ids = token_ids
        self._enough = enough
        # Position of the second token of each pair, and for such a position that of the previous equal pair.
        self._latest: dict[tuple[int, int], int] = {}
        self._earlier = [_NOWHERE]

    def find(self, tail: list[int]) -> int | None:
        """Return the position after the longest match of the end of ``tail``; the latest of equal matches.

        None if the last two tokens of ``tail`` do not occur before another token. ``tail`` may be the list itself.
        """
        match = self.match(tail)
        return None if match is None else match[0]

    def match(self, tail: list[int]) -> tuple[int, int] | None:
        """Return the result of ``find`` and the length of the match, 2 to ``enough`` tokens."""
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
        """Return how many tokens up to ``place`` match the end of ``tail``; the last two are known to match."""
        token_ids, length = self._token_ids, 2
        while (
            length < self._enough
            and length <= place
            and length < len(tail)
            and token_ids[place - length] == tail[-1 - length]
        ):
            length += 1
        return length
