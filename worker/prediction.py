"""Where an output stands in what its caller predicted: for guesses at what follows, and to count what came true."""

from __future__ import annotations

from collections.abc import Iterable

from .suffix_index import SuffixIndex

# Of the latest tokens, as many as an index looks at.
_TAIL = 4


class PredictionCursor:
    """Follows an output through its prediction, whose beginning it is taken to begin with.

    An output that leaves the prediction is found in it again by its last tokens. So it depends on nothing but the two.

    Args:
        token_ids: of the prediction.

    Attributes:
        place: of the token of the prediction that comes next; None while the output is nowhere in it.
        num_predicted: tokens of the output that came next in the prediction.
    """

    def __init__(self, token_ids: list[int]) -> None:
        self.place: int | None = 0
        self.num_predicted = 0
        self._token_ids = token_ids
        self._index = SuffixIndex(token_ids)
        self._tail: list[int] = []

    def follow(self, token_ids: Iterable[int]) -> None:
        """Read the next tokens of the output."""
        for token_id in token_ids:
            self._tail = [*self._tail[1 - _TAIL :], token_id]
            place = self.place
            if place is not None and place < len(self._token_ids) and self._token_ids[place] == token_id:
                self.num_predicted += 1
                self.place = place + 1
            else:
                self.place = self._index.find(self._tail)

    def following(self, num_tokens: int) -> list[int]:
        """Return at most so many tokens that come next."""
        return [] if self.place is None else self._token_ids[self.place : self.place + num_tokens]
