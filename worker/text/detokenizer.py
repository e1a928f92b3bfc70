"""Text from output tokens as they come, equal at the end to the tokenizer's decode of the whole.

``tokenizers.DecodeStream`` holds back incomplete characters. Two cases need more: a run of byte-fallback tokens
(``<0xE3>``) is decoded as one, so that an invalid byte late in the run changes the text of all of it; and an
incomplete character at the end comes out only in a decode of all tokens, which ``flush`` makes. Special tokens that are
skipped are left out here: the bytes before and after one are neighbours in the whole.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def byte_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the tokens that stand for single bytes in SentencePiece-like vocabularies; empty for others."""
    ids = (tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256))
    return frozenset(token_id for token_id in ids if token_id is not None)


class IncrementalDetokenizer:
    """The text of one request's output tokens.

    Args:
        byte_ids: ``byte_token_ids(tokenizer)``, computed once per tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, byte_ids: frozenset[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._byte_ids = byte_ids
        added = tokenizer.get_added_tokens_decoder() if skip_special_tokens else {}
        self._skipped_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._byte_run: list[int] = []
        self._num_chars = 0

    def add(self, token_ids: list[int]) -> str:
        """Return the text that ``token_ids`` complete."""
        token_ids = [token_id for token_id in token_ids if token_id not in self._skipped_ids]
        self._token_ids += token_ids
        text = ""
        for token_id in token_ids:
            if token_id in self._byte_ids:
                self._byte_run.append(token_id)
                continue
            if self._byte_run:
                piece = self._stream.step(self._tokenizer, [*self._byte_run, token_id])
                self._byte_run.clear()
            else:
                piece = self._stream.step(self._tokenizer, token_id)
            text += piece or ""
        self._num_chars += len(text)
        return text

    def flush(self) -> str:
        """Return what is still held back; call once, after the last token."""
        whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        return whole[self._num_chars :]
