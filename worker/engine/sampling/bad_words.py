"""Sequences of tokens that an output must not contain."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class BadWords:
    """Tokens that would complete one of ``sequences``, and are banned as the next output token of one request.

    As in vLLM the sequences are matched with output tokens only. A sequence is indexed by its last token but one, so
    that a new token costs a look-up, not a comparison with every sequence.

    Args:
        sequences: none of them is empty.
        output_token_ids: the output so far, including that of a previous engine.
    """

    def __init__(self, sequences: Iterable[list[int]], output_token_ids: list[int]) -> None:
        single: set[int] = set()
        self._longer: dict[int, list[list[int]]] = {}
        history_len = 0
        for sequence in sequences:
            if len(sequence) == 1:
                single.add(sequence[0])
            else:
                self._longer.setdefault(sequence[-2], []).append(sequence)
                history_len = max(history_len, len(sequence) - 1)
        self._single = np.array(sorted(single), np.int64)
        self._history_len = history_len
        self._latest = output_token_ids[max(0, len(output_token_ids) - history_len) :]

    def append(self, token_id: int) -> None:
        """Record the next output token."""
        if self._history_len:
            self._latest.append(token_id)
            del self._latest[: -self._history_len]

    def banned_ids(self) -> NDArray[np.int64]:
        """Return the tokens that would complete a sequence; may contain duplicates."""
        nearly = self._longer.get(self._latest[-1], ()) if self._latest else ()
        completing = [sequence[-1] for sequence in nearly if self._latest[1 - len(sequence) :] == sequence[:-1]]
        return np.concatenate([self._single, completing]).astype(np.int64) if completing else self._single
