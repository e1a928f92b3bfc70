"""Which tokens of a vocabulary need care when they become text."""

from __future__ import annotations

import msgspec
from tokenizers import Tokenizer


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
