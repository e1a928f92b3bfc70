"""Limits on the tokens of a request in a step.

Some models compute a lone token differently from several, which limits where a request may be split.
Mamba-2 of some families (Zamba2, Nemotron-H) limits the step of its recurrence from below while it scans several
tokens, but not when a single token follows a state. So a token's result depends on its chunk. Generated tokens are
computed one by one, and must be computed one by one again when a request is resumed or was preempted, because other
chunks would lead to other tokens. Likewise a prompt must not end in a chunk of one token on one engine and of several
on another.
"""

from __future__ import annotations

from typing import Protocol

from .request import Request


class Chunking(Protocol):
    """Decides where a request may be split, and whether a step may begin it."""

    def admits(self, request: Request, num_scheduled: int, budget: int) -> bool:
        """Return whether a waiting request may join a step that has ``num_scheduled`` tokens and ``budget`` left."""
        ...

    def limit(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return how many of ``num_new_tokens`` may be computed next; 0 if the request must wait for a larger step."""
        ...


class AnyChunks:
    """Allows a request to be split anywhere."""

    def admits(self, request: Request, num_scheduled: int, budget: int) -> bool:
        return True

    def limit(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        return num_new_tokens


class GeneratedTokensAlone:
    """Computes generated tokens one by one, and prompt tokens that follow a state never one by one.

    A first chunk may have one token, since no state precedes it. With a budget of at least 4 tokens, a request that
    runs alone always advances: if its prompt lacks 3 tokens, 3 are computed; else 2 or more, and never all but one.
    """

    MIN_BUDGET = 4

    def admits(self, request: Request, num_scheduled: int, budget: int) -> bool:
        return True

    def limit(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        num_lacking = request.num_prompt_tokens - num_computed_tokens
        if num_lacking <= 0:
            return min(num_new_tokens, 1)
        if num_new_tokens >= num_lacking:
            return num_lacking
        if num_new_tokens == num_lacking - 1:
            num_new_tokens -= 1
        return num_new_tokens if num_new_tokens > 1 or num_computed_tokens == 0 else 0


class WholePrompts:
    """Computes a prompt in a single step, for a model with tokens that attend to later tokens.

    A request keeps no state after its step, so its blocks are numbers without memory, and no request is preempted. Only
    the token budget limits a step, which holds at least one request of ``max_model_len``. If more tokens make a step no
    more efficient, it ends at ``enough_tokens``: clients get its results while the next step is computed, and send more
    requests before the engine runs out of work.

    Args:
        enough_tokens: tokens of a step beyond which the throughput no longer rises; None if unlimited.
    """

    def __init__(self, enough_tokens: int | None) -> None:
        self._enough_tokens = enough_tokens

    def admits(self, request: Request, num_scheduled: int, budget: int) -> bool:
        """Admit ``request`` if the budget holds all of it; else it waits, and is the first of a later step."""
        num_tokens = num_scheduled + request.num_tokens
        if self._enough_tokens is not None and num_scheduled > 0 and num_tokens > self._enough_tokens:
            return False
        return request.num_tokens <= budget

    def limit(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        return num_new_tokens


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
