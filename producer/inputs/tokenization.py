"""What a caller says of the tokens of a prompt, in vLLM's words and in those of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...shared.deployment.records import ModelCard
from ...shared.errors import UnsupportedParameterError, ValidationError
from ...shared.messages.requests import EngineCoreRequest
from ...shared.params.tokenization import LEFT, MODEL_LENGTH, RIGHT, Tokenization, check_truncation, num_kept
from ...shared.values.shown import shown
from .options import RequestOptions, check_flag

_KNOWN = ("add_special_tokens", "max_length", "truncate_prompt_tokens", "truncation", "truncation_side")


def tokenization_of(options: RequestOptions) -> Tokenization | None:
    """Return what ``tokenization_kwargs`` say; None if that is nothing.

    Raises:
        ValidationError: there is something else in them, or two of them contradict each other.
    """
    kwargs: Any = options.get("tokenization_kwargs")
    if not kwargs:
        return None
    if not isinstance(kwargs, Mapping):
        raise ValidationError(f"tokenization_kwargs must be a dict, got {shown(kwargs)}")
    given = {name: value for name, value in kwargs.items() if value is not None}
    unknown = [shown(name) for name in given if name not in _KNOWN]
    if unknown:
        raise ValidationError(f"tokenization_kwargs may have {', '.join(_KNOWN)}; got {', '.join(unknown)}")
    if "add_special_tokens" in given:
        check_flag("tokenization_kwargs: add_special_tokens", given["add_special_tokens"])
    side = given.get("truncation_side")
    if side not in (None, LEFT, RIGHT):
        raise ValidationError(f"tokenization_kwargs: truncation_side must be 'left' or 'right', got {shown(side)}")
    kept = _truncation(given)
    if kept is None and side is None and "add_special_tokens" not in given:
        return None
    return Tokenization(
        truncate_prompt_tokens=kept, add_special_tokens=given.get("add_special_tokens"), truncation_side=side
    )


def check_tokenization(request: EngineCoreRequest, card: ModelCard) -> int | None:
    """Return how many tokens of the prompt are kept at most; None if that is all, or if no worker has told yet.

    Raises:
        ValidationError: more than the model takes, or parameters and ``tokenization_kwargs`` say different numbers.
        UnsupportedParameterError: the prompt is embeddings.
    """
    kept = request.truncate_prompt_tokens
    if kept is None:
        return None
    params = request.pooling_params or request.sampling_params
    if params is not None and params.truncate_prompt_tokens not in (None, kept):
        raise ValidationError(
            f"truncate_prompt_tokens is {params.truncate_prompt_tokens} in the parameters and {kept} in "
            "tokenization_kwargs; say it once"
        )
    if request.prompt_embeds is not None:
        raise UnsupportedParameterError("truncate_prompt_tokens needs a prompt of tokens, not of embeddings")
    if not card.max_model_len:
        return None if kept == MODEL_LENGTH else kept
    sampling = request.sampling_params
    return num_kept(kept, card.max_model_len, 0 if sampling is None else sampling.max_tokens or 1)


def _truncation(given: Mapping[str, Any]) -> int | None:
    """``truncate_prompt_tokens``, by that name or as transformers has it."""
    wanted = given.get("truncation")
    if wanted not in (None, True, False, "do_not_truncate", "longest_first"):
        raise ValidationError(f"tokenization_kwargs: truncation must be True or False, got {shown(wanted)}")
    is_on = wanted in (True, "longest_first")
    if "max_length" in given and not is_on:
        raise ValidationError("tokenization_kwargs: max_length needs truncation=True; or pass truncate_prompt_tokens")
    of_transformers = given.get("max_length", MODEL_LENGTH) if is_on else None
    said = given.get("truncate_prompt_tokens", of_transformers)
    if said is None:
        return None
    check_truncation(said)
    if of_transformers not in (None, MODEL_LENGTH, said):
        raise ValidationError(
            f"tokenization_kwargs: max_length ({of_transformers}) and truncate_prompt_tokens ({said}) are the same; "
            "pass one"
        )
    return said
