"""Tokens of a vocabulary: their bytes, those that decode in a special way, and the sequences of given strings.

The API returns the bytes of a single token with its log probability. A decode of one token does not give them: it
replaces a part of a character by a replacement character, and may strip a space.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from tokenizers import Tokenizer

from ...shared.errors import ValidationError
from ...shared.params.answer_formats import REASONING_FORMATS
from ...shared.values.shown import shown

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


class TokenKinds(msgspec.Struct, frozen=True):
    """Tokens of a vocabulary that need special handling.

    Args:
        byte_ids: tokens that represent single bytes, in SentencePiece-like vocabularies.
        special_ids: tokens that a decode may skip.
        added: text of the tokens that are added to the base vocabulary, including special tokens.
    """

    byte_ids: frozenset[int]
    special_ids: frozenset[int]
    added: dict[int, str]

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> TokenKinds:
        """Scan the vocabulary of ``tokenizer``; call once per tokenizer."""
        byte_ids = (tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256))
        added = tokenizer.get_added_tokens_decoder()
        return cls(
            byte_ids=frozenset(token_id for token_id in byte_ids if token_id is not None),
            special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
            added={token_id: token.content for token_id, token in added.items()},
        )


def bad_word_sequences(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Return the token sequences of ``words``: each word at the start of a text, and after a space.

    The second sequence is omitted if it ends with the first, which already forbids it. (vLLM omits it unless both have
    the same length: with "Hello" in two tokens, it allows " Hello" in one token.)

    Raises:
        ValidationError: a word has no tokens.
    """
    plain = [word.lstrip(" ") or word for word in words]
    encodings = tokenizer.encode_batch([*plain, *(f" {word}" for word in plain)], add_special_tokens=False)
    sequences = [encoding.ids for encoding in encodings]
    unique: dict[tuple[int, ...], None] = {}
    for word, alone, spaced in zip(words, sequences[: len(words)], sequences[len(words) :], strict=True):
        if not alone:
            raise ValidationError(f"bad_words contains {shown(word)}, for which this model's tokenizer has no tokens")
        unique[tuple(alone)] = None
        if spaced[-len(alone) :] != alone:
            unique[tuple(spaced)] = None
    return [list(sequence) for sequence in unique if sequence]


def find_marks(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """Return the marks around thinking that are both tokens of the vocabulary; None if no pair is."""
    pairs = map(marks_of, REASONING_FORMATS)
    return next(
        (marks for marks in pairs if marks and all(tokenizer.token_to_id(mark) is not None for mark in marks)), None
    )


def marks_of(reasoning_parser: str) -> tuple[str, str] | None:
    """Return the marks around reasoning of a format; None if ``reasoning_parser`` is empty."""
    if not reasoning_parser:
        return None
    reasoning = REASONING_FORMATS[reasoning_parser]
    return reasoning.start, reasoning.end


def find_think_token_ids(tokenizer: Tokenizer, reasoning_parser: str = "") -> tuple[int, int] | None:
    """Return the tokens that start and end thinking, of ``reasoning_parser`` if not empty.

    None if the vocabulary has no such pair.
    """
    marks = marks_of(reasoning_parser) or find_marks(tokenizer)
    start, end = (None, None) if marks is None else map(tokenizer.token_to_id, marks)
    return None if start is None or end is None else (start, end)
