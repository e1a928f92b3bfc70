"""The bytes that a single token stands for: what the API tells beside a log probability.

A decode of one token will not do: it makes a replacement mark of a part of a character, and may strip a space.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from .token_kinds import TokenKinds

_SPACE_MARK = "▁"


class TokenBytes:
    """Looks tokens up as they are asked for, and remembers them: answers use a small part of a vocabulary."""

    def __init__(self, tokenizer: Tokenizer, kinds: TokenKinds) -> None:
        self._tokenizer = tokenizer
        self._kinds = kinds
        decoder = tokenizer.decoder
        form = "" if decoder is None else decoder.__getstate__().decode()
        self._byte_of = byte_alphabet() if '"ByteLevel"' in form else {}
        self._has_space_mark = _SPACE_MARK in form
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Return the token's bytes; none for an id outside of the vocabulary, which padded models may choose."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
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
    """Return the byte that each character of a byte-level vocabulary stands for.

    Bytes that are printable in Latin-1 stand for themselves, the others for the characters from 256 on, in order.
    Source: GPT-2's tokenizer.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}
