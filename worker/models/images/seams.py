"""Where an image's tokens and those of the text around it meet.

A processor writes an image's tokens into the text, and then makes tokens of the whole. Where an image begins or ends
with line breaks, as Gemma's do, these may be one token with the line breaks of the text beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Seams:
    """Joins tokens as the model's own tokenizer would have made them of the whole text.

    Args:
        tokenizer: of transformers; None where an image's tokens are none of text.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer

    def append(self, token_ids: list[int], more: Sequence[int]) -> int:
        """Put ``more`` behind ``token_ids``; return where its first token lies, or would."""
        start = len(token_ids)
        joined = self._joined(token_ids[-1], more[0]) if token_ids and more else None
        if joined is None:
            token_ids += more
            return start
        token_ids[-1:] = joined
        token_ids += more[1:]
        return len(token_ids) - len(more)

    def _joined(self, left: int, right: int) -> list[int] | None:
        """What stands for both; None where they stay as they are."""
        if self._tokenizer is None or not (self._is_breaks(right) and self._is_breaks(left)):
            return None
        text = self._tokenizer.decode([left]) + self._tokenizer.decode([right])
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _is_breaks(self, token_id: int) -> bool:
        text = self._tokenizer.decode([token_id])
        return bool(text) and not text.strip("\n")
