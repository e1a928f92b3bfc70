"""Prompts that are given as embeddings: what the engine core checks of them, and how it tells them apart.

In ``Request.token_ids`` each row has a placeholder, so that scheduler and block pool need to know nothing of it. What
looks at the tokens of a prompt asks ``Request.prompt_token_ids``, which has none then. The rows themselves meet the
model in ``input_embeds.py``.
"""

from __future__ import annotations

import hashlib

from ....shared.errors import UnsupportedParameterError, ValidationError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.prompt_embeds import PromptEmbeds

PLACEHOLDER_TOKEN_ID = 0
# An exponent of ones is that of infinities and NaN; numpy has no bfloat16.
_BFLOAT16_EXPONENT = 0x7F80


def prompt_of(message: EngineCoreRequest) -> list[int]:
    """The token ids of a request's prompt: a placeholder for each row of embeddings."""
    if message.prompt_embeds is None:
        return message.prompt_token_ids or []
    return [PLACEHOLDER_TOKEN_ID] * message.num_prompt_tokens


def extra_keys_of(message: EngineCoreRequest) -> tuple[str | None, ...]:
    """What must be the same, beside the tokens, for two requests to share blocks of the KV cache."""
    keys = (message.tenant, message.cache_salt)
    if message.prompt_embeds is None:
        return keys
    embeds = message.prompt_embeds
    said = f"{embeds.dtype} {embeds.shape}".encode()
    return (*keys, hashlib.sha256(said + hashlib.sha256(embeds.data).digest()).hexdigest())


def check_prompt_embeds(message: EngineCoreRequest, hidden_size: int | None) -> None:
    """Refuse embeddings that this engine cannot run.

    Args:
        hidden_size: of the model's input embeddings; None if the engine takes none.

    Raises:
        UnsupportedParameterError: it takes none, or not with what else the request asks.
        ValidationError: they have another hidden size, are not finite, or come beside token ids.
    """
    embeds = message.prompt_embeds
    if embeds is None:
        return
    if hidden_size is None:
        raise UnsupportedParameterError(
            "prompt_embeds: this engine takes no prompt embeddings; have it started with --enable-prompt-embeds"
        )
    if message.prompt_token_ids:
        raise ValidationError("prompt_embeds and prompt_token_ids are both set; give one of them")
    if message.sampling_params is not None and message.sampling_params.prompt_logprobs is not None:
        raise UnsupportedParameterError("prompt_logprobs needs a prompt of tokens, not of embeddings; leave it at None")
    if embeds.shape[1] != hidden_size:
        raise ValidationError(
            f"prompt_embeds has rows of {embeds.shape[1]}, but the model's hidden size is {hidden_size}"
        )
    if not _is_finite(embeds):
        raise ValidationError("prompt_embeds holds an infinity or NaN; all values must be finite")


def _is_finite(embeds: PromptEmbeds) -> bool:
    # Here, not above: whoever imports the scheduler shall not have to load numpy.
    import numpy as np

    if embeds.dtype == "bfloat16":
        bits = np.frombuffer(embeds.data, "<u2")
        return not ((bits & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT).any()
    return bool(np.isfinite(np.frombuffer(embeds.data, np.dtype(embeds.dtype).newbyteorder("<"))).all())
