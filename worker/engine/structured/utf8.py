"""Keeps output valid UTF-8 where xgrammar does not.

Its negated character classes, and so all JSON strings, accept the bytes of surrogates and some overlong encodings.
These bytes decode to several characters each, so a string could exceed its ``maxLength``. Each of these sequences is
recognizable by two bytes: a leading byte and a second byte that must not follow it.
"""

from __future__ import annotations

import re

import numpy as np

from .grammar import Bitmask
from .vocabulary import Vocabulary

# Leading byte -> the range of second bytes that are not UTF-8 (RFC 3629), though they are continuation bytes.
_WRONG_SECOND_BYTES = {0xE0: (0x80, 0x9F), 0xED: (0xA0, 0xBF), 0xF0: (0x80, 0x8F), 0xF4: (0x90, 0xBF)}
_WRONG_PAIR = re.compile(rb"\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]|\xf4[\x90-\xbf]")


def without_wrong_pairs(tokens: list[bytes]) -> list[bytes]:
    """Return ``tokens`` with every token empty that is invalid UTF-8 in any context."""
    return [b"" if _WRONG_PAIR.search(token) else token for token in tokens]


class Utf8Guard:
    """Masks of the tokens that may follow each leading byte."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._last_bytes = bytes(token[-1] if token else 0 for token in vocabulary.tokens)
        first = np.array([token[0] if token else 0 for token in vocabulary.tokens], np.uint8)
        self._allowed = {
            lead: _packed((first < low) | (first > high)) for lead, (low, high) in _WRONG_SECOND_BYTES.items()
        }

    def restrict(self, bitmask: Bitmask, row: int, last_token_id: int) -> None:
        """Clear the tokens in ``row`` that must not follow ``last_token_id``."""
        allowed = self._allowed.get(self._last_bytes[last_token_id])
        if allowed is not None:
            bitmask[row] &= allowed


def _packed(is_allowed: np.ndarray) -> Bitmask:
    padded = np.zeros(-(-len(is_allowed) // 32) * 32, np.bool_)
    padded[: len(is_allowed)] = is_allowed
    return np.packbits(padded, bitorder="little").view(np.int32)
