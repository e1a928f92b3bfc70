"""What an engine goes on with that gets the delivered tokens as the end of the prompt, and counts nothing of them."""

from __future__ import annotations

from ...shared.errors import UnsupportedParameterError
from ...shared.messages.requests import EXACT, EngineCoreRequest
from ...shared.params.sampling import SamplingParams


def check_resume(engine: str, message: EngineCoreRequest, params: SamplingParams) -> None:
    """Refuse a request that demands what ``engine`` cannot promise.

    Raises:
        UnsupportedParameterError: ``resume`` is "exact", and the request would go on with other tokens.
    """
    if message.resume == EXACT and not continues_exactly(params):
        raise UnsupportedParameterError(
            f"resume='exact': engine {engine!r} continues exactly only what is greedy (temperature 0) and has none of "
            "presence_penalty, frequency_penalty and bad_words of several tokens; leave resume out, or ask a model "
            "that Penstock's engine serves"
        )


def continues_exactly(params: SamplingParams) -> bool:
    """Whether an engine that resumes goes on with the tokens that the former one would have made."""
    has_counts = params.presence_penalty or params.frequency_penalty
    # One that has begun among the delivered tokens is not seen to be going on.
    has_sequences = any(len(words) > 1 for words in params.bad_words_token_ids or ())
    return params.greedy and not has_counts and not has_sequences
