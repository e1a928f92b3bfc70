"""The bytes of each token of a model, which grammars constrain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ....shared.errors import UnsupportedParameterError

_SPACE = "▁"


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _TokenizerFile(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []
    decoder: dict[str, Any] | None = None


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model.

    Args:
        tokens: ``[V]``, by id; empty for special tokens, which represent no text, and for ids without a token.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    tokens: list[bytes]
    eos_token_ids: list[int]

    @property
    def size(self) -> int:
        """Number of logits of the model, which may exceed the number of tokens of its tokenizer."""
        return len(self.tokens)

    @classmethod
    def load(cls, folder: Path, vocab_size: int, eos_token_ids: list[int]) -> Vocabulary:
        """Read ``tokenizer.json``.

        Does not use the ``tokenizers`` library, which holds the GIL for 0.9 s at 150k tokens.

        Raises:
            UnsupportedParameterError: the vocabulary is neither byte-level nor SentencePiece, so the text of several
                tokens is not the concatenation of their bytes.
        """
        read = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_TokenizerFile)
        bytes_of = _spelling(read.decoder)
        tokens = [b""] * vocab_size
        for token, token_id in _pairs(read.model.vocab):
            if token_id < vocab_size:
                tokens[token_id] = bytes_of(token)
        for added in read.added_tokens:
            if added.id < vocab_size:
                tokens[added.id] = b"" if added.special else added.content.encode()
        for token_id in eos_token_ids:
            tokens[token_id] = b""
        return cls(tokens, sorted(eos_token_ids))


def _pairs(vocab: dict[str, int] | list[tuple[str, float]]) -> Iterable[tuple[str, int]]:
    if isinstance(vocab, dict):
        return vocab.items()
    return ((token, token_id) for token_id, (token, _) in enumerate(vocab))


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for the 256 bytes: printable bytes map to themselves, the others to 256 and above."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    return bytes(_ALPHABET[char] for char in token) if all(char in _ALPHABET for char in token) else b""


def _sentence_piece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode()


def _spelling(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """Return the function that converts a token to bytes as the tokenizer's decoder does."""
    parts = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return _byte_level_bytes
    if kinds & {"ByteFallback", "Metaspace"}:
        return _sentence_piece_bytes
    raise UnsupportedParameterError(
        "structured_outputs: the tokenizer of this model is neither byte-level nor SentencePiece, so the text of its "
        "tokens cannot be constrained"
    )
