"""Prompts passed as embeddings: how the engine core checks and identifies them.

``Request.token_ids`` has a placeholder for each row, so the scheduler and the block pool need no special case. Code
that reads the tokens of a prompt uses ``Request.prompt_token_ids``, which is then empty. ``input_embeds.py`` passes the
rows to the model.
"""

from __future__ import annotations

import hashlib

from ....shared.errors import UnsupportedParameterError, ValidationError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.prompts import PromptEmbeds

PLACEHOLDER_TOKEN_ID = 0
# All ones in the exponent mean infinity or NaN. A bit test, since numpy has no bfloat16.
_BFLOAT16_EXPONENT = 0x7F80


def prompt_of(message: EngineCoreRequest) -> list[int]:
    """Return the token ids of a request's prompt: a placeholder for each row of embeddings."""
    if message.prompt_embeds is None:
        return message.prompt_token_ids or []
    return [PLACEHOLDER_TOKEN_ID] * message.num_prompt_tokens


def extra_keys_of(message: EngineCoreRequest) -> tuple[str | None, ...]:
    """Return the keys, in addition to the tokens, that must be equal for two requests to share KV-cache blocks."""
    keys = (message.tenant, message.cache_salt)
    if message.prompt_embeds is None:
        return keys
    embeds = message.prompt_embeds
    header = f"{embeds.dtype} {embeds.shape}".encode()
    return (*keys, hashlib.sha256(header + hashlib.sha256(embeds.data).digest()).hexdigest())


def check_prompt_embeds(message: EngineCoreRequest, hidden_size: int | None) -> None:
    """Refuse embeddings that this engine cannot run.

    Args:
        hidden_size: width of the model's input embeddings; None if the engine accepts no prompt embeddings.

    Raises:
        UnsupportedParameterError: the engine accepts none, or not together with other parameters of the request.
        ValidationError: they have another hidden size, are not finite, or are combined with token ids.
    """
    embeds = message.prompt_embeds
    if embeds is None:
        return
    if hidden_size is None:
        raise UnsupportedParameterError(
            "prompt_embeds: this engine takes no prompt embeddings; start it with --enable-prompt-embeds"
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
    # Imported here because the scheduler must be importable without numpy.
    import numpy as np

    if embeds.dtype == "bfloat16":
        bits = np.frombuffer(embeds.data, "<u2")
        return not ((bits & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT).any()
    return bool(np.isfinite(np.frombuffer(embeds.data, np.dtype(embeds.dtype).newbyteorder("<"))).all())
