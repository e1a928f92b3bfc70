"""The bytes of a single token, which the API returns with its log probability.

A decode of one token does not give them: it replaces a part of a character by a replacement character, and may strip a
space.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from .token_kinds import TokenKinds

_SPACE_MARK = "▁"


class TokenBytes:
    """Bytes by token id, computed on demand and cached, since outputs use a small part of a vocabulary."""

    def __init__(self, tokenizer: Tokenizer, kinds: TokenKinds) -> None:
        self._tokenizer = tokenizer
        self._kinds = kinds
        decoder = tokenizer.decoder
        form = "" if decoder is None else decoder.__getstate__().decode()
        self._byte_of = byte_alphabet() if '"ByteLevel"' in form else {}
        self._has_space_mark = _SPACE_MARK in form
        self._cache: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Return the token's bytes; empty for an id outside the vocabulary, which padded models may generate."""
        content = self._cache.get(token_id)
        if content is None:
            content = self._cache[token_id] = self._bytes_of(token_id)
        return content

    def _bytes_of(self, token_id: int) -> bytes:
        added = self._kinds.added.get(token_id)
        if added is not None:
            return added.encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._kinds.byte_ids:
            return bytes([int(piece[3:5], 16)])
        if self._byte_of and all(char in self._byte_of for char in piece):
            return bytes(map(self._byte_of.__getitem__, piece))
        if self._has_space_mark:
            return piece.replace(_SPACE_MARK, " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary represents.

    Bytes that are printable in Latin-1 are represented by themselves, others by the characters from 256 on, in order.
    Source: GPT-2's tokenizer.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}
