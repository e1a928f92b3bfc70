"""Digests of a request: of its content, and of the beginning of its conversation.

A known request_id attaches only to a request with the same content. By the beginnings of its conversation a request
finds the engine that has them in its cache, and is found itself.
"""

from __future__ import annotations

import base64
import copy
import functools
import hashlib

import msgspec

from ...shared.messages.requests import EngineCoreRequest
from ...shared.params.kinds import RequestOutputKind
from ...shared.params.pooling import PoolingParams
from ...shared.params.sampling import SamplingParams

# Limit of the ends of turns to look for, including the request's own.
MAX_ENDS = 4
# A shorter prefix is computed again in less time than waiting for an engine takes.
MIN_BYTES = 512
_encoder = msgspec.msgpack.Encoder()
# 64 bits each, enough to notice the mistake of one caller among the requests of one tenant.
DIGEST_CHARS = 16
_content_encoder = msgspec.msgpack.Encoder(order="deterministic")


class Digests(msgspec.Struct, frozen=True, gc=False):
    """Digests of a request.

    Args:
        wanted: digests of earlier requests to look for, the longest conversation first.
        own: digests by which later requests find this one.
    """

    wanted: tuple[str, ...] = ()
    own: tuple[str, ...] = ()


def conversation_digests(request: EngineCoreRequest) -> Digests:
    """Return the digests of a request: of its messages, if they are long enough, and of its ``session_id``.

    Cost: 60 us for 15 messages of 1,000 characters on a busy machine. SHA-1 takes 0.6 of SHA-256's time and a third of
    BLAKE2b's. A forged collision only sends two conversations of one tenant to the same engine.
    """
    ends = [] if request.messages is None else _ends(request, request.messages)
    own = ends[-1:]
    for name in _names(request):
        ends.insert(0, name)
        own.append(name)
    return Digests(tuple(reversed(ends)), tuple(own))


def _names(request: EngineCoreRequest) -> list[str]:
    """Return the digests of the session, and last of the request itself if it is resumable."""
    session = [] if request.session_id is None else [_digest_text(_root(request, "session", request.session_id))]
    return [*session, _digest_text(_root(request, "request", request.request_id))] if request.resumable else session


def _ends(request: EngineCoreRequest, messages: list[dict[str, object]]) -> list[str]:
    """Return the digests of the messages up to each of the last ends of turns, if they are long enough."""
    followed = [message.get("role") == "assistant" for message in messages[1:]]
    ends = [index for index, is_end in enumerate([*followed, True]) if is_end][-MAX_ENDS:]
    hashed, num_bytes, digests = _root(request, "messages", _rendering(request)), 0, []
    for index, message in enumerate(messages):
        data = _encoder.encode(message)
        hashed.update(data)
        num_bytes += len(data)
        if index in ends and num_bytes >= MIN_BYTES:
            digests.append(_digest_text(hashed))
    return digests


def _rendering(request: EngineCoreRequest) -> object:
    """Return the options by which messages become tokens, because other options give another prompt."""
    num_last_tokens, tokenization = request.truncate_prompt_tokens, request.tokenization
    if num_last_tokens is None and tokenization is None:
        return request.chat_template_kwargs
    return request.chat_template_kwargs, num_last_tokens, tokenization


def _root(request: EngineCoreRequest, kind: str, of: object) -> hashlib._Hash:
    lora = None if request.lora_request is None else request.lora_request.digest or request.lora_request.lora_name
    begun = _encoder.encode((kind, request.tenant, request.cache_salt, lora, of))
    return hashlib.sha1(begun, usedforsecurity=False)


def _digest_text(hashed: hashlib._Hash) -> str:
    return base64.urlsafe_b64encode(hashed.digest()).decode().rstrip("=")


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
    encoded_params = _content_encoder.encode(_comparable(params))
    lora_digest = _known_digest(lora.encode()) if lora else "-"
    return f"{_digest(_content_encoder.encode(prompt))} {_known_digest(encoded_params)} {lora_digest}"


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
