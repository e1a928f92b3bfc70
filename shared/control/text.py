"""Calls to a model's tokenizer; under the rules of ``calls``."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import ValidationError
from ..params.checks import check_token_ids
from ..values.encodable import check_text


class Tokenize(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, tag="tokenize"):
    """Encode a text, or chat messages under the chat template, as token ids. Answer: ``TokenizedText``.

    Args:
        add_special_tokens: add those around a text; the chat template writes its own.
        has_pieces: return the bytes of each token.
    """

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    has_pieces: bool = False

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValidationError("exactly one of prompt and messages must be given")
        if self.prompt is not None:
            check_text("prompt", self.prompt)


class Detokenize(msgspec.Struct, array_like=True, tag="detokenize"):
    """Decode token ids, special tokens included. Answer: ``DetokenizedText``."""

    token_ids: list[int]

    def __post_init__(self) -> None:
        check_token_ids("tokens", self.token_ids)


class GetTokenizer(msgspec.Struct, array_like=True, tag="get_tokenizer"):
    """Return the model's tokenizer. Answer: ``TokenizerFile``."""


class TokenizedText(msgspec.Struct, array_like=True, omit_defaults=True, tag="tokenized_text"):
    """``pieces`` are the bytes of each token, if they were requested."""

    token_ids: list[int]
    max_model_len: int
    pieces: list[bytes] = []


class DetokenizedText(msgspec.Struct, array_like=True, tag="detokenized_text"):
    """The text of the token ids."""

    text: str


class TokenizerFile(msgspec.Struct, array_like=True, tag="tokenizer_file"):
    """``data`` is the model's ``tokenizer.json``, compressed by zlib."""

    data: bytes
