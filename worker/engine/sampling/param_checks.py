"""Checks of sampling parameters that need an engine, because they depend on the vocabulary and the prompt's tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ....shared.errors import UnsupportedParameterError, ValidationError
from ....shared.params.sampling import SamplingParams

# They are sent in one record: 3.5 MB, which a worker process decodes in 200 ms and encodes in 22 ms.
MAX_PROMPT_LOGPROBS = 1 << 18


def check_params(params: SamplingParams, num_prompt_tokens: int, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
    """Refuse parameters that this engine cannot honour.

    Raises:
        UnsupportedParameterError: no engine of this version can, or the model lacks the tokens that it needs.
        ValidationError: token ids are not in the vocabulary, or no token would be left to choose.
    """
    params.check_supported()
    bad_words = params.bad_words_token_ids or []
    if params.bad_words and not bad_words:
        raise ValidationError("bad_words must come with bad_words_token_ids: an engine core has no tokenizer")
    if not all(bad_words):
        raise ValidationError("bad_words_token_ids must hold no empty list")
    if params.truncate_prompt_tokens is not None:
        raise UnsupportedParameterError("truncate_prompt_tokens is for a worker process: an engine core has no text")
    if params.is_thinking_limited and params.think_token_ids is None:
        raise UnsupportedParameterError(
            f"thinking_token_budget={params.thinking_token_budget} needs a model with tokens that start and end "
            f"thinking, and this one has none; leave it at None"
        )
    grammar = params.structured_outputs
    if grammar is not None and grammar.enable_in_reasoning is False and params.think_token_ids is None:
        raise UnsupportedParameterError(
            "structured_outputs.enable_in_reasoning=False needs a model with tokens that start and end thinking, and "
            "this one has none; leave it at None"
        )
    for name, token_ids in (
        ("stop_token_ids", params.stop_token_ids or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logit_bias", params.logit_bias or ()),
        ("bad_words_token_ids", [token_id for sequence in bad_words for token_id in sequence]),
        ("think_token_ids", params.think_token_ids or ()),
    ):
        check_in_vocabulary(name, token_ids, vocab_size)
    _check_some_token_is_left(params, vocab_size, eos_token_ids)
    num_logprobs = (num_prompt_tokens - 1) * (1 + (params.prompt_logprobs or 0))
    if params.prompt_logprobs is not None and num_logprobs > MAX_PROMPT_LOGPROBS:
        raise ValidationError(
            f"prompt_logprobs={params.prompt_logprobs} for a prompt of {num_prompt_tokens} tokens makes {num_logprobs} "
            f"log probabilities, and at most {MAX_PROMPT_LOGPROBS} are sent; ask for fewer alternatives or shorten it"
        )


def check_in_vocabulary(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Refuse ids that are not in ``[0, vocab_size)``.

    Raises:
        ValidationError: an id is outside; the message names the first.
    """
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise ValidationError(f"{name} holds {wrong}, but the vocabulary has {vocab_size} tokens")


def _check_some_token_is_left(params: SamplingParams, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
    """Refuse parameters that can never leave a token.

    A bad word of several tokens may ban the last token for a single step; ``token_rules`` handles that. Without a list
    of allowed tokens all tokens that may ever be banned count, so that the sampler need not check. Only a vocabulary of
    a few hundred tokens could be exhausted.
    """
    bad_words = params.bad_words_token_ids or []
    ending = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(eos_token_ids))
    ending = ending if params.min_tokens else set()
    if params.allowed_token_ids is None:
        is_left = len(ending | {sequence[-1] for sequence in bad_words}) < vocab_size
    else:
        is_left = bool(set(params.allowed_token_ids) - ending - {words[0] for words in bad_words if len(words) == 1})
    if not is_left:
        raise ValidationError(
            "allowed_token_ids, bad_words and min_tokens leave no token to choose: allow another, or ask for less"
        )
