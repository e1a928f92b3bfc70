"""Prompts of more than tokens: images among the tokens, or embeddings instead of them, and how blocks identify them.

The placeholder tokens are the same for every image of one size, so blocks that contain some of them are also
identified by the image's digest. Blocks before the image are not: chats with the same beginning share them, whichever
images follow. Some models let the tokens of an image attend to each other. One forward must compute all of them, so a
prompt is not split there, neither by the end of a chunk nor by a hit in the KV cache.

For embeddings ``Request.token_ids`` has a placeholder for each row, so the scheduler and the block pool need no special
case. Code that reads the tokens of a prompt uses ``Request.prompt_token_ids``, which is then empty. ``input_embeds.py``
passes the rows to the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....shared.errors import UnsupportedParameterError, ValidationError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.prompts import PromptEmbeds

PLACEHOLDER_TOKEN_ID = 0
# All ones in the exponent mean infinity or NaN. A bit test, since numpy has no bfloat16.
_BFLOAT16_EXPONENT = 0x7F80


@dataclass(frozen=True, eq=False)
class ImageSpan:
    """An image in a prompt.

    Args:
        start, stop: range of its tokens.
        places: positions in the prompt whose embeddings are the image's features, ascending.
        key: identity of the image's contents.
        features: ``[len(places), hidden size]``, or several times as wide if deeper layers get features too: a tensor
            on the CPU. The scheduler does not read it.
        axes: ``[3, stop - start]``, positions in three axes relative to the image's first; None if each token has one
            position.
        bidirectional: first token and end of each run of tokens that attend to each other, ascending. One forward
            computes a whole run. Empty if attention is causal, as in text.
    """

    start: int
    stop: int
    places: list[int]
    key: bytes
    features: Any
    axes: Any = None
    bidirectional: tuple[tuple[int, int], ...] = ()


def block_keys(images: Sequence[ImageSpan], block_size: int, first: int, end: int) -> dict[int, bytes]:
    """Return the image part of the identity of blocks ``first .. end`` of a request; blocks without images are absent.

    It includes each image's start, because a block may hold the end of one image and the beginning of the next.
    """
    keys: dict[int, bytes] = {}
    for image in images:
        for block in range(max(first, image.start // block_size), min(end, -(-image.stop // block_size))):
            keys[block] = keys.get(block, b"") + image.key + image.start.to_bytes(8, "little")
    return keys


def last_cut(images: Sequence[ImageSpan], num_tokens: int) -> int:
    """Return how many of the first ``num_tokens`` tokens of a request can be computed without the tokens after them."""
    for image in images:
        for first, end in image.bidirectional:
            if first < num_tokens < end:
                return first
    return num_tokens


def uncut_chunk(images: Sequence[ImageSpan], num_computed_tokens: int, num_new_tokens: int) -> int:
    """Return how many of ``num_new_tokens`` a step may compute: 0 if an image's run of tokens does not fit."""
    return last_cut(images, num_computed_tokens + num_new_tokens) - num_computed_tokens


def uncut_hit(images: Sequence[ImageSpan], num_blocks: int, block_size: int) -> int:
    """Return how many of the first ``num_blocks`` blocks, which are cached, may be used as computed."""
    while (cut := last_cut(images, num_blocks * block_size)) < num_blocks * block_size:
        num_blocks = cut // block_size
    return num_blocks


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
