"""Prompts as they are sent: how text becomes tokens, and embeddings in their place."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import ValidationError
from ..values.shown import shown

EMBEDS_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
LEFT, RIGHT = "left", "right"
MODEL_LENGTH = -1


class PromptEmbeds(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """A prompt as embeddings, one row of ``shape`` ``(prompt tokens, hidden size)`` in place of each token.

    ``data`` holds the items, row after row, little-endian.

    Raises:
        ValidationError: the dtype is unknown, or the size of ``data`` does not fit dtype and shape.
    """

    dtype: str
    shape: tuple[int, int]
    data: bytes

    def __post_init__(self) -> None:
        if self.dtype not in EMBEDS_ITEM_BYTES:
            raise ValidationError(
                f"prompt_embeds.dtype must be one of {', '.join(EMBEDS_ITEM_BYTES)}, got {shown(self.dtype)}"
            )
        num_rows, hidden_size = self.shape
        if min(self.shape) < 1 or len(self.data) != num_rows * hidden_size * EMBEDS_ITEM_BYTES[self.dtype]:
            raise ValidationError(
                f"prompt_embeds.data must hold {num_rows} x {hidden_size} items of {self.dtype}, got "
                f"{len(self.data)} bytes"
            )


class Tokenization(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, kw_only=True, gc=False):
    """Options for tokenizing a prompt, for the worker process, which has the tokenizer.

    Args:
        truncate_prompt_tokens: as in ``SamplingParams``, which apply if this is None.
        add_special_tokens: those that the model expects around a text; None: around a text, but not around a chat,
            whose template writes its own.
        truncation_side: side that is cut off; "left" keeps the last tokens, "right" the first; None is "left".
    """

    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    truncation_side: str | None = None


class Cut(msgspec.Struct, frozen=True, gc=False):
    """A limit of ``num_tokens`` for a prompt; the others are removed from ``side``."""

    num_tokens: int
    side: str = LEFT

    def apply(self, token_ids: list[int]) -> list[int]:
        """Return the tokens that remain of ``token_ids``."""
        return token_ids[-self.num_tokens :] if self.side == LEFT else token_ids[: self.num_tokens]


def check_truncation(truncate_prompt_tokens: Any) -> None:
    """Raise ``ValidationError`` unless it is -1, or a number of tokens from 1."""
    is_number = isinstance(truncate_prompt_tokens, int) and not isinstance(truncate_prompt_tokens, bool)
    if not is_number or not (truncate_prompt_tokens == MODEL_LENGTH or 1 <= truncate_prompt_tokens < 2**31):
        raise ValidationError(
            f"truncate_prompt_tokens must be a number of tokens, or -1 for what the model takes, got "
            f"{shown(truncate_prompt_tokens)}"
        )


def num_kept(truncate_prompt_tokens: int, max_model_len: int, num_output_tokens: int) -> int:
    """Return how many tokens of a prompt remain.

    Args:
        num_output_tokens: output tokens that -1 reserves; 0 for a prompt that is pooled.

    Raises:
        ValidationError: it is more than the model takes, or -1 leaves no token of the prompt.
    """
    if truncate_prompt_tokens > max_model_len:
        raise ValidationError(
            f"truncate_prompt_tokens must be at most max_model_len ({max_model_len}), got {truncate_prompt_tokens}"
        )
    if truncate_prompt_tokens != MODEL_LENGTH:
        return truncate_prompt_tokens
    if num_output_tokens >= max_model_len:
        raise ValidationError(
            f"truncate_prompt_tokens=-1 leaves max_tokens ({num_output_tokens}) their room, and max_model_len is "
            f"{max_model_len}: no token of the prompt is left; ask for fewer output tokens, or say how many to keep"
        )
    return max_model_len - num_output_tokens
