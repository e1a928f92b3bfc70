"""What a core that drives another engine checks of a request by itself, before that engine sees it."""

from __future__ import annotations

from collections.abc import Iterable

from ...shared.errors import ValidationError
from ...shared.messages.requests import EngineCoreRequest
from ...shared.params.sampling import SamplingParams
from ..engine.sampling.param_checks import check_in_vocabulary, check_params
from ..engine.scheduling.request import Request
from ..request_checks import check_prompt_length


def checked_request(
    message: EngineCoreRequest,
    params: SamplingParams,
    *,
    max_model_len: int,
    vocab_size: int,
    eos_token_ids: Iterable[int],
) -> Request:
    """Return what is known here of ``message``, whose delivered tokens are its first output.

    Args:
        params: how it is to be sampled.

    Raises:
        ValidationError: a parameter, or a token of the prompt or of what was delivered, cannot be; names it.
        PromptTooLongError: prompt and one output token exceed ``max_model_len``.
    """
    prompt, delivered = message.prompt_token_ids or [], message.output_token_ids or []
    eos_token_ids = frozenset(eos_token_ids)
    check_params(params, len(prompt), vocab_size, eos_token_ids)
    if not prompt:
        raise ValidationError("prompt_token_ids is empty")
    check_prompt_length(len(prompt), max_model_len)
    check_in_vocabulary("prompt_token_ids", prompt, vocab_size)
    check_in_vocabulary("output_token_ids", delivered, vocab_size)
    return Request(
        message.request_id,
        prompt,
        params,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        output_token_ids=delivered,
        priority=message.priority,
    )
