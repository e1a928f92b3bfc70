"""Splits bytes into tokens, the longest first, as most tokenizers do."""

from __future__ import annotations

from .vocabulary import Vocabulary


class Spelling:
    """Splits text into tokens of a vocabulary, which approximates the model's tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._token_ids: dict[bytes, int] = {}
        for token_id, token in enumerate(vocabulary.tokens):
            if token:
                self._token_ids.setdefault(token, token_id)
        self._longest = max(map(len, self._token_ids), default=0)

    def tokens_of(self, text: bytes, room: int) -> list[int]:
        """Return at most ``room`` tokens for the start of ``text``, up to a byte that no token begins with."""
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
