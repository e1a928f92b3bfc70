"""Limit on the prompt tokens that a step scores for ``prompt_logprobs``."""

from __future__ import annotations

from .request import Request

# Logits are float32 over the vocabulary: this many rows of 152k take 155 MB, while a whole chunk would take gigabytes.
MAX_PROMPT_ROWS = 256


class PromptRowBudget:
    """Tokens that a step may still compute for requests with ``prompt_logprobs``."""

    def __init__(self) -> None:
        self._num_left = MAX_PROMPT_ROWS

    def limit(self, request: Request, num_new_tokens: int) -> int:
        """Return how many of ``num_new_tokens`` may be computed: all without ``prompt_logprobs``, else at least 1."""
        if request.prompt_logprobs is None:
            return num_new_tokens
        num_new_tokens = max(1, min(num_new_tokens, self._num_left))
        self._num_left -= num_new_tokens
        return num_new_tokens
