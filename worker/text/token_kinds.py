"""Tokens of a vocabulary that need special handling when they are decoded."""

from __future__ import annotations

import msgspec
from tokenizers import Tokenizer


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
