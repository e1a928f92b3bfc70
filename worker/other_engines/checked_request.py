"""Checks of a request that a core makes before another engine sees it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from ...shared.errors import UnsupportedParameterError, ValidationError
from ...shared.messages.requests import EngineCoreRequest
from ...shared.params.pooling import PoolingSetup
from ...shared.params.sampling import SamplingParams
from ...shared.values.shown import shown
from ..engine.sampling.param_checks import check_in_vocabulary, check_params
from ..engine.scheduling.request import Request
from ..request_checks import check_prompt_length, check_result_size, check_served, check_task

# Sampling parameters that no engine has to know: the client sends one request per answer, and the worker process makes
# the text, its ends and the token ids of bad words.
_HANDLED_BEFORE_THE_ENGINE = frozenset(
    {
        "n",
        "stop",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "repetition_detection",
        "bad_words_token_ids",
        "think_token_ids",
        "truncate_prompt_tokens",
    }
)


def refuse_unserved(engine: str, params: SamplingParams, served: Collection[str]) -> None:
    """Refuse every sampling parameter that is set and that ``engine`` does not serve.

    So a parameter that is new to ``SamplingParams`` is refused by an engine until its mapping names it.

    Args:
        served: names of the parameters that the engine's mapping passes on.

    Raises:
        UnsupportedParameterError: names the field and the remedy.
    """
    for name, default in _DEFAULTS.items():
        value = getattr(params, name)
        if value == default or name in served or name in _HANDLED_BEFORE_THE_ENGINE:
            continue
        if name == "thinking_token_budget" and not params.is_thinking_limited:
            continue
        raise UnsupportedParameterError(f"{name}={shown(value)} is not supported by {engine}; leave it at {default}")


def checked_request(
    message: EngineCoreRequest,
    params: SamplingParams,
    *,
    max_model_len: int,
    vocab_size: int,
    eos_token_ids: Iterable[int],
) -> Request:
    """Return the checked request of ``message``. Its delivered tokens are the first output tokens.

    Args:
        params: its sampling parameters.

    Raises:
        ValidationError: a parameter, a prompt token or a delivered token is invalid; names it.
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
        lora_request=message.lora_request,
    )


def checked_pooling_request(
    message: EngineCoreRequest, tasks: Sequence[str], setup: PoolingSetup, *, max_model_len: int, vocab_size: int
) -> Request:
    """Return the checked request of ``message``, to be pooled.

    Args:
        tasks: those of the model, its own first.

    Raises:
        ValidationError: the model does not support the task, a prompt token is invalid, or the result is too large.
        PromptTooLongError: the prompt exceeds ``max_model_len``.
    """
    check_task(message, tasks)
    params, prompt = message.pooling_params, message.prompt_token_ids or []
    assert params is not None  # since generate is not one of the tasks
    if message.prompt_embeds is not None:
        raise UnsupportedParameterError(
            "prompt_embeds: a pooling model takes only text or token ids; leave prompt_embeds out"
        )
    if not prompt:
        raise ValidationError("prompt_token_ids is empty")
    check_prompt_length(len(prompt), max_model_len, is_pooled=True)
    check_in_vocabulary("prompt_token_ids", prompt, vocab_size)
    if (params.task or tasks[0]).startswith("token_"):
        check_result_size(len(prompt), params, setup)
    return Request(
        message.request_id,
        prompt,
        check_served(message),
        max_model_len=max_model_len,
        priority=message.priority,
        lora_request=message.lora_request,
    )


_DEFAULTS = msgspec.structs.asdict(SamplingParams())
