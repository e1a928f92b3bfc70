"""Sequences of tokens that an output shall not hold."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class BadWords:
    """What the next output token of one request may not be, so that none of ``sequences`` is completed.

    As in vLLM the sequences are looked for among the output tokens alone. Found by the token before a sequence's last,
    so that a token costs a look-up and not a comparison with every sequence.

    Args:
        sequences: none of them empty.
        output_token_ids: the output so far, that of a former engine included.
    """

    def __init__(self, sequences: Iterable[list[int]], output_token_ids: list[int]) -> None:
        single: set[int] = set()
        self._longer: dict[int, list[list[int]]] = {}
        num_kept = 0
        for sequence in sequences:
            if len(sequence) == 1:
                single.add(sequence[0])
            else:
                self._longer.setdefault(sequence[-2], []).append(sequence)
                num_kept = max(num_kept, len(sequence) - 1)
        self._single = np.array(sorted(single), np.int64)
        self._num_kept = num_kept
        self._latest = output_token_ids[max(0, len(output_token_ids) - num_kept) :]

    def append(self, token_id: int) -> None:
        """Note the next output token."""
        if self._num_kept:
            self._latest.append(token_id)
            del self._latest[: -self._num_kept]

    def banned_ids(self) -> NDArray[np.int64]:
        """Tokens that would complete a sequence; some may come twice."""
        nearly = self._longer.get(self._latest[-1], ()) if self._latest else ()
        completing = [sequence[-1] for sequence in nearly if self._latest[1 - len(sequence) :] == sequence[:-1]]
        return np.concatenate([self._single, completing]).astype(np.int64) if completing else self._single
