"""The merges of a vocabulary that has scores instead, as sentencepiece forms its tokens.

Every cut of every token is looked up: a million with large vocabularies, which takes seconds in a loop. So all cuts are
looked up together, by hashes of texts that follow from sums over the characters before them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# An odd number, so that it has an inverse modulo 2^64.
_BASE = 0x9E3779B97F4A7C15
# First bits of hashes, of which a table shows whether any token has them.
_SHOWN_BITS = 24

_Hashes = NDArray[np.uint64]
_Places = NDArray[np.int64]


def derive_merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that form each token: by descending score of that token, then by the first one's id.

    Two texts have the same hash by a chance of 2^-64.
    """
    lens = np.array([len(token) for token in tokens], np.int64)
    ends = np.cumsum(lens)
    starts = ends - lens
    # One more, or a text would have the hash of the same text with zeros after it.
    characters = np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64) + 1
    owners = np.repeat(np.arange(len(tokens)), lens)
    places = np.arange(len(owners)) - starts[owners]
    longest = int(lens.max(initial=0))
    # Before each character, and after the last.
    sums = np.zeros(len(owners) + 1, np.uint64)
    np.cumsum(characters * _powers(_BASE, longest)[places], out=sums[1:])
    vocabulary = _Vocabulary(sums[ends] - sums[starts])

    cuts = np.flatnonzero(places > 0)
    owner = owners[cuts]
    left = sums[cuts] - sums[starts[owner]]
    right = (sums[ends[owner]] - sums[cuts]) * _powers(pow(_BASE, -1, 1 << 64), longest)[places[cuts]]
    likely = np.flatnonzero(vocabulary.may_have(left) & vocabulary.may_have(right))
    left_ids, right_ids = vocabulary.find(left[likely]), vocabulary.find(right[likely])
    owner = owner[likely]
    order = np.lexsort((left_ids, owner, -np.asarray(scores, float)[owner]))
    order = order[(left_ids[order] >= 0) & (right_ids[order] >= 0)]
    texts = tokens.__getitem__
    return list(zip(map(texts, left_ids[order].tolist()), map(texts, right_ids[order].tolist()), strict=True))


class _Vocabulary:
    """The tokens with these hashes."""

    def __init__(self, hashes: _Hashes) -> None:
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]
        self._shown = np.zeros(1 << _SHOWN_BITS, bool)
        self._shown[self._first_bits(hashes)] = True

    def may_have(self, hashes: _Hashes) -> NDArray[np.bool_]:
        """Return False for texts that are no tokens, and for few others True."""
        return self._shown[self._first_bits(hashes)]

    def find(self, hashes: _Hashes) -> _Places:
        """Return the ids of tokens, of equal ones the last; -1 for other texts."""
        places = np.searchsorted(self._sorted, hashes, side="right") - 1
        return np.where(self._sorted[places] == hashes, self._order[places], -1)

    def _first_bits(self, hashes: _Hashes) -> _Hashes:
        return hashes >> np.uint64(64 - _SHOWN_BITS)


def _powers(base: int, num: int) -> _Hashes:
    """Return the powers of ``base`` from 0 to ``num``, modulo 2^64."""
    return np.cumprod(np.array([1, *[base] * num], np.uint64))
