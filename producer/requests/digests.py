"""By what a request finds the engine that has the beginning of its conversation in its cache, and is found itself.

Nothing has tokens here yet, so words are compared: the messages up to where an assistant's message follows are what
the model was given when it wrote that one. A request looks for the last few such ends, its own included, and is known
by its own: so it does not matter in which form an answer comes back, without its reasoning or with its tool calls as
objects.
What else changes keys and values of a prompt, or who may share them, goes in first (``prefix_cache.py``).
"""

from __future__ import annotations

import base64
import hashlib

import msgspec

from ...shared.messages.requests import EngineCoreRequest

# Limit of the ends of turns to look for, including the request's own.
MAX_ENDS = 4
# A shorter prefix is computed again in less time than waiting for an engine takes.
MIN_BYTES = 512

_encoder = msgspec.msgpack.Encoder()


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
    session = [] if request.session_id is None else [_text(_root(request, "session", request.session_id))]
    return [*session, _text(_root(request, "request", request.request_id))] if request.resumable else session


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
            digests.append(_text(hashed))
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


def _text(hashed: hashlib._Hash) -> str:
    return base64.urlsafe_b64encode(hashed.digest()).decode().rstrip("=")
