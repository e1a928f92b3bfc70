"""Text from output tokens as they come, equal at the end to the tokenizer's decode of the whole.

``tokenizers.DecodeStream`` holds back incomplete characters; at the end the rest is taken from one decode of
all output tokens, so that an incomplete last character comes out as the tokenizer would write it.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class IncrementalDetokenizer:
    """The text of one request's output tokens."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self.token_ids: list[int] = []
        self._num_chars = 0

    def add(self, token_ids: list[int]) -> str:
        """Return the text that ``token_ids`` complete."""
        text = ""
        for token_id in token_ids:
            self.token_ids.append(token_id)
            piece = self._stream.step(self._tokenizer, token_id)
            if piece:
                text += piece
        self._num_chars += len(text)
        return text

    def flush(self) -> str:
        """Return what is still held back; call once, after the last token."""
        whole = self._tokenizer.decode(self.token_ids, skip_special_tokens=self._skip_special_tokens)
        rest = whole[self._num_chars :]
        self._num_chars = len(whole)
        return rest
