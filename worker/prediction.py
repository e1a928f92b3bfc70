"""Position of an output in its caller's prediction, to draft the next tokens and to count accepted ones."""

from __future__ import annotations

from collections.abc import Iterable

from .suffix_index import SuffixIndex

# Number of latest tokens that the index compares.
_TAIL = 4


class PredictionCursor:
    """Cursor of an output in its prediction, from the start of both.

    An output that leaves the prediction is located in it again by its last tokens. So the position depends only on
    output and prediction.

    Args:
        token_ids: tokens of the prediction.

    Attributes:
        place: index of the prediction's next token; None while the output is not in the prediction.
        num_predicted: number of output tokens that were the next ones of the prediction.
    """

    def __init__(self, token_ids: list[int]) -> None:
        self.place: int | None = 0
        self.num_predicted = 0
        self._token_ids = token_ids
        self._index = SuffixIndex(token_ids)
        self._tail: list[int] = []

    def follow(self, token_ids: Iterable[int]) -> None:
        """Process the next tokens of the output."""
        for token_id in token_ids:
            self._tail = [*self._tail[1 - _TAIL :], token_id]
            place = self.place
            if place is not None and place < len(self._token_ids) and self._token_ids[place] == token_id:
                self.num_predicted += 1
                self.place = place + 1
            else:
                self.place = self._index.find(self._tail)

    def following(self, num_tokens: int) -> list[int]:
        """Return up to ``num_tokens`` next tokens of the prediction."""
        return [] if self.place is None else self._token_ids[self.place : self.place + num_tokens]
