"""Token counts of a response, as OpenAI counts them."""

from __future__ import annotations

import msgspec

from ....shared.messages.outcome import Usage as TokenCounts


class PromptTokensDetails(msgspec.Struct):
    """``cached_tokens``: prompt tokens found in the engine's cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Tokens of a prediction that are in the completions, and those that are not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct):
    """Token counts of one response. A prompt counts once for any ``n``. Details are set if there was a prediction."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def sum_of(cls, counts: list[TokenCounts]) -> Usage:
        """Return the sum over several prompts."""
        num_prompt_tokens = sum(usage.num_prompt_tokens for usage in counts)
        num_output_tokens = sum(usage.num_output_tokens for usage in counts)
        cached = PromptTokensDetails(sum(usage.num_cached_tokens for usage in counts))
        num_accepted = sum(usage.num_accepted_prediction_tokens for usage in counts)
        num_rejected = sum(usage.num_rejected_prediction_tokens for usage in counts)
        details = CompletionTokensDetails(num_accepted, num_rejected) if num_accepted or num_rejected else msgspec.UNSET
        return cls(num_prompt_tokens, num_output_tokens, num_prompt_tokens + num_output_tokens, cached, details)


class UsageCounter:
    """The usage of a stream, summed from the last deltas of all its answers."""

    def __init__(self) -> None:
        self._counts: dict[int, TokenCounts] = {}

    def add(self, prompt: int, counts: TokenCounts | None) -> None:
        """Count one answer to prompt number ``prompt``; answers to the same prompt share its tokens."""
        if counts is None:
            return
        before = self._counts.get(prompt)
        if before is not None:
            counts = TokenCounts(
                max(before.num_prompt_tokens, counts.num_prompt_tokens),
                before.num_output_tokens + counts.num_output_tokens,
                min(before.num_cached_tokens, counts.num_cached_tokens),
                before.num_accepted_prediction_tokens + counts.num_accepted_prediction_tokens,
                before.num_rejected_prediction_tokens + counts.num_rejected_prediction_tokens,
            )
        self._counts[prompt] = counts

    @property
    def usage(self) -> Usage:
        return Usage.sum_of(list(self._counts.values()))
