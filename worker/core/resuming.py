"""Which requests can be resumed exactly by an engine that gets the delivered tokens as the end of the prompt.

Such an engine does not count the delivered tokens in penalties.
"""

from __future__ import annotations

from ...shared.errors import UnsupportedParameterError
from ...shared.messages.requests import EXACT, EngineCoreRequest
from ...shared.params.sampling import SamplingParams


def check_resume(engine: str, message: EngineCoreRequest, params: SamplingParams) -> None:
    """Refuse a request that must be resumed exactly, if ``engine`` cannot do it.

    Raises:
        UnsupportedParameterError: ``resume`` is "exact", and the request might continue with other tokens.
    """
    if message.resume == EXACT and not continues_exactly(params):
        raise UnsupportedParameterError(
            f"resume='exact': engine {engine!r} continues exactly only requests that are greedy (temperature 0) and "
            "have none of presence_penalty, frequency_penalty and bad_words of several tokens; leave resume out, or "
            "use a model that Penstock's engine serves"
        )


def continues_exactly(params: SamplingParams) -> bool:
    """Return whether the resuming engine produces the same tokens as the former one would have."""
    has_counts = params.presence_penalty or params.frequency_penalty
    # The engine does not notice a sequence that began within the delivered tokens.
    has_sequences = any(len(words) > 1 for words in params.bad_words_token_ids or ())
    return params.greedy and not has_counts and not has_sequences
