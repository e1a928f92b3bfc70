"""Where a request may be cut, for models that compute a lone token otherwise than several.

Mamba-2 of some families (Zamba2, Nemotron-H) limits the step of its recurrence from below while it scans several
tokens, and does not where one token follows a state. So a token's result depends on its chunk. Generated tokens are
computed one by one, and so they must be again when a request is resumed or was preempted: else it would go on with
other tokens. Likewise a prompt must not end in a chunk of one token here and of several there.
"""

from __future__ import annotations

from typing import Protocol

from .request import Request


class Chunking(Protocol):
    """Decides where a request may be cut."""

    def limit(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return how many of ``num_new_tokens`` may be computed next; 0 if it must wait for a step with more."""
        ...


class AnyChunks:
    """A request may be cut anywhere."""

    def limit(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        return num_new_tokens


class GeneratedTokensAlone:
    """Generated tokens go one by one, those of a prompt that follow a state never so.

    A first chunk may have one token: no state comes before it. With 4 tokens of budget or more, a request that is alone
    always moves: of a prompt that lacks 3 tokens 3 are computed, else 2 or more, and never all but one.
    """

    MIN_BUDGET = 4

    def limit(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        num_lacking = request.num_prompt_tokens - num_computed_tokens
        if num_lacking <= 0:
            return min(num_new_tokens, 1)
        if num_new_tokens >= num_lacking:
            return num_lacking
        if num_new_tokens == num_lacking - 1:
            num_new_tokens -= 1
        return num_new_tokens if num_new_tokens > 1 or num_computed_tokens == 0 else 0
