"""Text from output tokens as they come, equal at the end to what they add to the tokenizer's decode of the prompt.

``tokenizers.DecodeStream`` holds back incomplete characters. Two cases need more: a run of byte-fallback tokens
(``<0xE3>``) is decoded as one, so that an invalid byte late in the run changes the text of all of it; and an
incomplete character at the end comes out only in a decode of all tokens, which ``flush`` makes. Special tokens that are
skipped are left out here: the bytes before and after one are neighbours in the whole.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from .decode_context import NO_CONTEXT, REPLACEMENT, DecodeContext
from .token_kinds import TokenKinds


class IncrementalDetokenizer:
    """The text of one request's output tokens.

    Args:
        kinds: ``TokenKinds.of(tokenizer)``.
        context: the end of the request's prompt. By default there is none, and the text is that of the output alone.
        skip_special_tokens: leave them out.
        spaces_between_special_tokens: False leaves out the space that a decoder puts between added tokens that follow
            each other, as vLLM does for such tokenizers; without effect if special tokens are skipped.
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

        Several at once cost little more than one; if the last is within a character, their text comes with the next.
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
        """Return what is still held back; call once, after the last token."""
        whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        return self._without_split(whole[self._num_chars :])

    def _without_split(self, text: str) -> str:
        """Drop what is the prompt's of the first text, if the prompt ends within a character.

        The output may complete that character, which is then the output's.
        """
        split_text = self._split_text
        if not split_text or not text:
            return text
        self._split_text = ""
        is_completed = not text.startswith(split_text)
        return text[len(split_text.rstrip(REPLACEMENT) if is_completed else split_text) :]
