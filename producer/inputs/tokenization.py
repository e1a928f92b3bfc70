"""A caller's options for the tokens of a prompt, in the terms of vLLM and of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...shared.deployment.records import ModelCard
from ...shared.errors import UnsupportedParameterError, ValidationError
from ...shared.messages.requests import EngineCoreRequest
from ...shared.params.prompts import LEFT, MODEL_LENGTH, RIGHT, Tokenization, check_truncation, num_kept
from ...shared.values.shown import shown
from .options import RequestOptions, check_flag

_NAMES = ("add_special_tokens", "max_length", "truncate_prompt_tokens", "truncation", "truncation_side")


def tokenization_of(options: RequestOptions) -> Tokenization | None:
    """Return the options of ``tokenization_kwargs``; None if there are none.

    Raises:
        ValidationError: it has unknown names, or options that contradict each other.
    """
    kwargs: Any = options.get("tokenization_kwargs")
    if not kwargs:
        return None
    if not isinstance(kwargs, Mapping):
        raise ValidationError(f"tokenization_kwargs must be a dict, got {shown(kwargs)}")
    values = {name: value for name, value in kwargs.items() if value is not None}
    unknown = [shown(name) for name in values if name not in _NAMES]
    if unknown:
        raise ValidationError(f"tokenization_kwargs may have {', '.join(_NAMES)}; got {', '.join(unknown)}")
    if "add_special_tokens" in values:
        check_flag("tokenization_kwargs: add_special_tokens", values["add_special_tokens"])
    side = values.get("truncation_side")
    if side not in (None, LEFT, RIGHT):
        raise ValidationError(f"tokenization_kwargs: truncation_side must be 'left' or 'right', got {shown(side)}")
    limit = _truncation(values)
    if limit is None and side is None and "add_special_tokens" not in values:
        return None
    return Tokenization(
        truncate_prompt_tokens=limit, add_special_tokens=values.get("add_special_tokens"), truncation_side=side
    )


def check_tokenization(request: EngineCoreRequest, card: ModelCard) -> int | None:
    """Return the limit of the prompt's tokens after truncation; None without a limit, or if no worker has registered
    yet.

    Raises:
        ValidationError: the limit is more than the model supports, or differs between parameters and
            ``tokenization_kwargs``.
        UnsupportedParameterError: the prompt is embeddings.
    """
    limit = request.truncate_prompt_tokens
    if limit is None:
        return None
    params = request.pooling_params or request.sampling_params
    if params is not None and params.truncate_prompt_tokens not in (None, limit):
        raise ValidationError(
            f"truncate_prompt_tokens is {params.truncate_prompt_tokens} in the parameters and {limit} in "
            "tokenization_kwargs; pass one of them"
        )
    if request.prompt_embeds is not None:
        raise UnsupportedParameterError("truncate_prompt_tokens needs a prompt of tokens, not of embeddings")
    if not card.max_model_len:
        return None if limit == MODEL_LENGTH else limit
    sampling = request.sampling_params
    return num_kept(limit, card.max_model_len, 0 if sampling is None else sampling.max_tokens or 1)


def _truncation(values: Mapping[str, Any]) -> int | None:
    """Return ``truncate_prompt_tokens``, passed by that name or in the terms of transformers."""
    truncation = values.get("truncation")
    if truncation not in (None, True, False, "do_not_truncate", "longest_first"):
        raise ValidationError(f"tokenization_kwargs: truncation must be True or False, got {shown(truncation)}")
    is_on = truncation in (True, "longest_first")
    if "max_length" in values and not is_on:
        raise ValidationError("tokenization_kwargs: max_length needs truncation=True; or pass truncate_prompt_tokens")
    max_length = values.get("max_length", MODEL_LENGTH) if is_on else None
    limit = values.get("truncate_prompt_tokens", max_length)
    if limit is None:
        return None
    check_truncation(limit)
    if max_length not in (None, MODEL_LENGTH, limit):
        raise ValidationError(
            f"tokenization_kwargs: max_length ({max_length}) and truncate_prompt_tokens ({limit}) are the same option; "
            "pass one"
        )
    return limit
