"""Tokens for a text that is known as bytes: the longest first, as most tokenizers would have it."""

from __future__ import annotations

from .vocabulary import Vocabulary


class Spelling:
    """Cuts text into tokens of a vocabulary. It is a guess at what the model's tokenizer or the model would do."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._token_ids: dict[bytes, int] = {}
        for token_id, token in enumerate(vocabulary.tokens):
            if token:
                self._token_ids.setdefault(token, token_id)
        self._longest = max(map(len, self._token_ids), default=0)

    def tokens_of(self, text: bytes, room: int) -> list[int]:
        """Return at most ``room`` tokens that ``text`` begins with, up to a byte that no token begins with."""
        token_ids: list[int] = []
        start = 0
        while start < len(text) and len(token_ids) < room:
            end = min(len(text), start + self._longest)
            while end > start and text[start:end] not in self._token_ids:
                end -= 1
            if end == start:
                break
            token_ids.append(self._token_ids[text[start:end]])
            start = end
        return token_ids
