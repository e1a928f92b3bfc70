"""The tokens at the end of a prompt that change the text of its output.

Decoding the output alone strips the space of its first token (SentencePiece), or omits the space before its first word
(WordPiece). Besides, a character may begin in the prompt and end in the output.
"""

from __future__ import annotations

import codecs
from collections.abc import Container, Sequence
from itertools import chain, islice
from typing import NamedTuple

from tokenizers import Tokenizer

from .token_bytes import TokenBytes
from .token_kinds import TokenKinds

# A token that begins or ends within a character decodes to this.
REPLACEMENT = "\ufffd"
_MAX_CHAR_BYTES = 4
_CONTINUING = frozenset(bytes([value]) for value in range(0x80, 0xC0))
# Two characters of four bytes. If these tokens have no text, the output is decoded without context.
_MAX_TOKENS = 8

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class DecodeContext(NamedTuple):
    """Tokens of a prompt that are decoded before its output.

    Args:
        token_ids: tokens whose text belongs only to the prompt.
        split_ids: tokens after them, if the prompt ends within a character.
        split_text: text that ``split_ids`` add to the prompt; it ends in a replacement character.
    """

    token_ids: list[int]
    split_ids: list[int]
    split_text: str

    @classmethod
    def of_prompt(
        cls,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        kinds: TokenKinds,
        token_bytes: TokenBytes,
        *,
        skipped_ids: Container[int],
    ) -> DecodeContext:
        """Return the context for the output of ``prompt``.

        Args:
            skipped_ids: tokens that are omitted from the text.
        """
        backwards = (token_id for token_id in reversed(prompt) if token_id not in skipped_ids)
        last = list(islice(backwards, _MAX_TOKENS))
        num_split = _num_split([token_bytes[token_id] for token_id in last])
        split_ids = last[:num_split][::-1]
        # A decoder decodes a run of byte tokens as a whole, so a run of the output must not begin in the context.
        earlier = (token_id for token_id in chain(last[num_split:], backwards) if token_id not in kinds.byte_ids)
        token_ids: list[int] = []
        text = ""
        for token_id in islice(earlier, _MAX_TOKENS):
            token_ids.insert(0, token_id)
            text = tokenizer.decode(token_ids, skip_special_tokens=False)
            if not text.endswith(REPLACEMENT):
                break
        else:
            token_ids, text = [], ""
        whole = tokenizer.decode(token_ids + split_ids, skip_special_tokens=False) if split_ids else text
        return cls(token_ids, split_ids, whole[len(text) :])


NO_CONTEXT = DecodeContext([], [], "")


def _num_split(pieces: list[bytes]) -> int:
    """Return how many of the last tokens contain bytes of an incomplete character, back to the start of a character.

    Args:
        pieces: bytes of the last tokens, the last token first.
    """
    num_missing = _num_incomplete(b"".join(reversed(pieces)))
    is_within = False
    for number, piece in enumerate(pieces):
        if num_missing <= 0 and not is_within:
            return number
        num_missing -= len(piece)
        is_within = piece[:1] in _CONTINUING
    return len(pieces)


def _num_incomplete(data: bytes) -> int:
    """Return how many bytes at the end of ``data`` belong to an incomplete character."""
    for number in range(1, min(_MAX_CHAR_BYTES, len(data) + 1)):
        try:
            if not _utf8_decoder().decode(data[-number:]):
                return number
        except UnicodeDecodeError:
            continue
    return 0
