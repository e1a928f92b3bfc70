"""Text from output tokens as they come, equal at the end to the tokenizer's decode of the whole.

``tokenizers.DecodeStream`` holds back incomplete characters. Two cases need more: a run of byte-fallback tokens
(``<0xE3>``) is decoded as one, so that an invalid byte late in the run changes the text of all of it; and an
incomplete character at the end comes out only in a decode of all tokens, which ``flush`` makes. Special tokens that are
skipped are left out here: the bytes before and after one are neighbours in the whole.
"""

from __future__ import annotations

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TokenKinds(msgspec.Struct, frozen=True):
    """Which tokens of a vocabulary need care.

    Args:
        byte_ids: those that stand for single bytes, in SentencePiece-like vocabularies.
        special_ids: those that a decode may skip.
        added: the text of those that are no part of the model's vocabulary proper, the special ones among them.
    """

    byte_ids: frozenset[int]
    special_ids: frozenset[int]
    added: dict[int, str]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenKinds:
        """Look through the vocabulary; once per tokenizer is enough."""
        byte_ids = (tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256))
        added = tokenizer.get_added_tokens_decoder()
        return cls(
            byte_ids=frozenset(token_id for token_id in byte_ids if token_id is not None),
            special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
            added={token_id: token.content for token_id, token in added.items()},
        )


class IncrementalDetokenizer:
    """The text of one request's output tokens.

    Args:
        kinds: ``TokenKinds.of(tokenizer)``.
        skip_special_tokens: leave them out.
        spaces_between_special_tokens: False leaves out the space that a decoder puts between added tokens that follow
            each other, as vLLM does for such tokenizers; without effect if special tokens are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        kinds: TokenKinds,
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

    def add(self, token_ids: list[int]) -> str:
        """Return the text that ``token_ids`` complete.

        Several at once cost little more than one; if the last is within a character, their text comes with the next.
        """
        token_ids = [token_id for token_id in token_ids if token_id not in self._skipped_ids]
        self._token_ids += token_ids
        if not token_ids:
            return ""
        if self._joined or self._byte_run or not self._byte_ids.isdisjoint(token_ids):
            return self._add_one_by_one(token_ids)
        piece = self._stream.step(self._tokenizer, token_ids) or ""
        self._num_chars += len(piece)
        return piece

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
        """Return what is still held back; call once, after the last token."""
        whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        return whole[self._num_chars :]
