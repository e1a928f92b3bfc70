"""Decode output tokens incrementally. In total the text equals the one that they add to a decode of the prompt.

``tokenizers.DecodeStream`` holds back incomplete characters. Two cases need more. A run of byte-fallback tokens
(``<0xE3>``) is decoded as a whole, since an invalid byte late in the run changes all of its text. An incomplete
character at the end appears only in a decode of all tokens, which ``flush`` does. Skipped special tokens are removed
before decoding, because the bytes before and after one are adjacent in the text.

The tokens at the end of a prompt change the text of its output. Decoding the output alone strips the space of its first
token (SentencePiece), or omits the space before its first word (WordPiece). Besides, a character may begin in the
prompt and end in the output.
"""

from __future__ import annotations

import codecs
from collections.abc import Container, Sequence
from itertools import chain, islice
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from .vocabulary import TokenBytes, TokenKinds

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


class IncrementalDetokenizer:
    """The text of one request's output tokens.

    Args:
        kinds: ``TokenKinds.from_tokenizer(tokenizer)``.
        context: end of the request's prompt. By default empty, so that the output is decoded alone.
        skip_special_tokens: whether special tokens are omitted.
        spaces_between_special_tokens: False omits the space that a decoder inserts between adjacent added tokens, as
            vLLM does for such tokenizers; without effect if special tokens are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        kinds: TokenKinds,
        context: DecodeContext = NO_CONTEXT,
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._byte_ids = kinds.byte_ids
        self._skipped_ids = kinds.special_ids if skip_special_tokens else frozenset()
        self._skip_special_tokens = skip_special_tokens
        self._joined = {} if skip_special_tokens or spaces_between_special_tokens else kinds.added
        self._is_after_added = False
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._byte_run: list[int] = []
        self._num_chars = 0
        self._split_text = ""
        self.add(context.token_ids)
        self.add(context.split_ids)
        self._split_text = context.split_text

    def add(self, token_ids: list[int]) -> str:
        """Return the text that ``token_ids`` complete.

        Several tokens cost little more than one. If the last one ends within a character, the text is returned later.
        """
        token_ids = [token_id for token_id in token_ids if token_id not in self._skipped_ids]
        self._token_ids += token_ids
        if not token_ids:
            return ""
        if self._joined or self._byte_run or not self._byte_ids.isdisjoint(token_ids):
            return self._without_split(self._add_one_by_one(token_ids))
        piece = self._stream.step(self._tokenizer, token_ids) or ""
        self._num_chars += len(piece)
        return self._without_split(piece)

    def _add_one_by_one(self, token_ids: list[int]) -> str:
        text = ""
        for token_id in token_ids:
            if token_id in self._byte_ids:
                self._byte_run.append(token_id)
                self._is_after_added = False
                continue
            if self._byte_run:
                piece = self._stream.step(self._tokenizer, [*self._byte_run, token_id])
                self._byte_run.clear()
            else:
                piece = self._stream.step(self._tokenizer, token_id)
            piece = piece or ""
            self._num_chars += len(piece)
            content = self._joined.get(token_id)
            text += piece if content is None or not self._is_after_added else content
            self._is_after_added = content is not None
        return text

    def flush(self) -> str:
        """Return the text that is still held back; call once, after the last token."""
        whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        return self._without_split(whole[self._num_chars :])

    def _without_split(self, text: str) -> str:
        """Drop the prompt's part of the first text, if the prompt ends within a character.

        If the output completes that character, it belongs to the output.
        """
        split_text = self._split_text
        if not split_text or not text:
            return text
        self._split_text = ""
        is_completed = not text.startswith(split_text)
        return text[len(split_text.rstrip(REPLACEMENT) if is_completed else split_text) :]
