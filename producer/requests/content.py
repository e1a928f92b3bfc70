"""Digests of a request's content: a known request_id attaches only to a request with the same content.

The enqueue script compares them (``enqueue.lua``). They cover the arguments of the caller, before a seed is drawn.
Options that say when and where the request runs, or how its output is delivered, are not part of them.
"""

from __future__ import annotations

import copy
import functools
import hashlib

import msgspec

from ...shared.messages.requests import EngineCoreRequest
from ...shared.params.kinds import RequestOutputKind
from ...shared.params.pooling import PoolingParams
from ...shared.params.sampling import SamplingParams

# 64 bits each, enough to notice the mistake of one caller among the requests of one tenant.
DIGEST_CHARS = 16

_encoder = msgspec.msgpack.Encoder(order="deterministic")


def content_of(request: EngineCoreRequest, params: SamplingParams | PoolingParams) -> str:
    """Return the digests of prompt, parameters and adapter, in the order of ``CONTENT`` in ``enqueue.lua``.

    Args:
        params: the caller's parameters, without the seed drawn for the request, and with ``n`` of all answers.

    Cost: 2 us for a short prompt, and 1 ms for 1 MB.
    """
    prompt = (
        request.prompt,
        request.prompt_token_ids,
        request.messages,
        request.chat_template_kwargs,
        request.text_pair,
        request.tokenization,
        request.prompt_embeds,
        None if request.images is None else [image.digest for image in request.images],
    )
    adapter = request.lora_request
    lora = "" if adapter is None else adapter.digest or adapter.lora_name
    encoded_params = _encoder.encode(_comparable(params))
    lora_digest = _known_digest(lora.encode()) if lora else "-"
    return f"{_digest(_encoder.encode(prompt))} {_known_digest(encoded_params)} {lora_digest}"


def _comparable(params: SamplingParams | PoolingParams) -> SamplingParams | PoolingParams:
    if isinstance(params, SamplingParams) and params.output_kind is not RequestOutputKind.DELTA:
        # The output has the same tokens in any kind.
        params = copy.copy(params)
        msgspec.structs.force_setattr(params, "output_kind", RequestOutputKind.DELTA)
    return params


def _digest(part: bytes) -> str:
    return hashlib.sha1(part, usedforsecurity=False).hexdigest()[:DIGEST_CHARS]


# Cached, because the requests of an app have few different parameters.
_known_digest = functools.lru_cache(maxsize=256)(_digest)
