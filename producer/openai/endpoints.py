"""Translate the path and body of a request to requests of the client; gateway, batches and responses share this.

SDKs, proxies and user interfaces send the defaults of the reference, also for fields that are not supported here. Such
a field is ignored; with any other value it is refused by name. Null is the default of every field. Fields that are
neither in the reference nor here are ignored and named (``unknown_fields``).
Sources: OpenAI's API reference; vLLM's ``ChatCompletionRequest``, ``CompletionRequest`` and ``ResponsesRequest``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ...shared.errors import PenstockError
from ..anthropic.body import MessagesBody
from ..anthropic.errors import MESSAGES
from ..anthropic.prepared import prepare_message
from .chat import ChatCompletionBody, prepare_chat
from .completions import CompletionBody, prepare_completion
from .errors import OpenAIError, bad_field, error_of
from .parsers import Parsers
from .pooling import EmbeddingsBody, prepare_embeddings
from .prepared import PreparedBody
from .responses.body import ResponseBody
from .responses.prepared import prepare_row
from .unknown_fields import without_unknown

Neutral = Mapping[str, tuple[Any, ...]]

_NEUTRAL_IN_VLLM: Neutral = {
    "use_beam_search": (False,),
    "detokenize": (True,),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
}
NEUTRAL_IN_CHAT: Neutral = {
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "echo": (False,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "documents": ([],),
    **_NEUTRAL_IN_VLLM,
}
NEUTRAL_IN_COMPLETIONS: Neutral = {
    "response_format": ({"type": "text"},),
    **_NEUTRAL_IN_VLLM,
}
# Without these fields the request would have another meaning: they shorten the conversation that is sent.
NEUTRAL_IN_MESSAGES: Neutral = {"thread": (), "compaction": ()}
NEUTRAL_IN_RESPONSES: Neutral = {
    "enable_response_messages": (False,),
    **_NEUTRAL_IN_VLLM,
}

CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
# For batches: a response that is not stored. Stored responses are handled by ``responses.service``.
RESPONSES = "/v1/responses"


def without_neutral(body: Mapping[str, Any], supported: frozenset[str], neutral: Neutral) -> dict[str, Any]:
    """Return ``body`` without the fields that are not ``supported`` and have a neutral value."""
    return {
        name: value
        for name, value in body.items()
        if name in supported
        or not (value is None or any(_is_same(value, default) for default in neutral.get(name, ())))
    }


def _is_same(value: Any, neutral: Any) -> bool:
    """Return whether two JSON values are equal; true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


class Endpoint(msgspec.Struct, frozen=True):
    """Decoding and preparation of the bodies of one path.

    Args:
        neutral: values of unsupported fields that have no effect. Any other value of these fields is refused.
    """

    body: type[msgspec.Struct]
    prepare: Callable[[Any, Parsers], PreparedBody]
    decode_json: Callable[[bytes], Any]
    neutral: Neutral

    def decode_body(self, body: bytes | Mapping[str, Any], *, strict: bool = False) -> tuple[Any, tuple[str, ...]]:
        """Return the body as a struct, and the paths of the fields that were ignored.

        Args:
            strict: refuse unknown fields.

        Raises:
            msgspec.MsgspecError: it is not JSON, or does not have the required form.
        """
        decoded, ignored = self._decode_known(body, strict=strict)
        return decoded, (*ignored, *getattr(decoded, "ignored", ()))

    def _decode_known(self, body: bytes | Mapping[str, Any], *, strict: bool) -> tuple[Any, tuple[str, ...]]:
        try:
            return (self.decode_json(body) if isinstance(body, bytes) else self._convert(body)), ()
        except msgspec.ValidationError:
            plain = msgspec.json.decode(body) if isinstance(body, bytes) else body
            if not isinstance(plain, Mapping):
                raise
            reduced = without_neutral(plain, frozenset(self.body.__struct_fields__), self.neutral)
            ignored: tuple[str, ...] = ()
            if not strict:
                reduced, ignored = without_unknown(reduced, self.body, refused=self.neutral)
            if len(reduced) == len(plain) and not ignored:
                raise
            return self._convert(reduced), ignored

    def _convert(self, body: Mapping[str, Any]) -> Any:
        return msgspec.convert(body, self.body, str_keys=True)  # keys in JSON are strings


def _endpoint(
    body: type[msgspec.Struct], prepare: Callable[[Any, Parsers], PreparedBody], neutral: Neutral
) -> Endpoint:
    return Endpoint(body, prepare, msgspec.json.Decoder(body).decode, neutral)


ENDPOINTS: Mapping[str, Endpoint] = {
    CHAT_COMPLETIONS: _endpoint(ChatCompletionBody, prepare_chat, NEUTRAL_IN_CHAT),
    COMPLETIONS: _endpoint(CompletionBody, lambda body, _: prepare_completion(body), NEUTRAL_IN_COMPLETIONS),
    EMBEDDINGS: _endpoint(EmbeddingsBody, lambda body, _: prepare_embeddings(body), {}),
    RESPONSES: _endpoint(ResponseBody, prepare_row, NEUTRAL_IN_RESPONSES),
    MESSAGES: _endpoint(MessagesBody, prepare_message, NEUTRAL_IN_MESSAGES),
}


class Decoded(msgspec.Struct, frozen=True):
    """A decoded body. Its values are not checked yet. ``ignored`` has the paths of fields that have no effect."""

    endpoint: Endpoint
    body: Any
    ignored: tuple[str, ...] = ()

    @property
    def model(self) -> str | None:
        """The model that the body names."""
        return self.body.model or None

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits, which are equal only for bodies with equal content, independent of order and
        spacing."""
        return _digest(self._content, num_bytes=4)

    @property
    def digest(self) -> str:
        """64 hexadecimal digits, as the fingerprint. Whether the answer is streamed does not count."""
        content = {name: value for name, value in self._content.items() if name not in ("stream", "stream_options")}
        return _digest(content, num_bytes=32)

    @property
    def _content(self) -> dict[str, Any]:
        return msgspec.to_builtins(self.body, str_keys=True)

    def prepare(self, parsers: Parsers) -> PreparedBody:
        """Translate the body to requests, for a model with these parsers.

        Raises:
            OpenAIError: 400, a field is invalid; it is named.
        """
        try:
            return self.endpoint.prepare(self.body, parsers)
        except PenstockError as error:
            raise error_of(error) from error


def _digest(content: dict[str, Any], *, num_bytes: int) -> str:
    encoded = msgspec.json.encode(content, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=num_bytes).hexdigest()


def decode(path: str, body: bytes | Mapping[str, Any], *, strict: bool = False) -> Decoded:
    """Decode the body for ``path``: JSON, or the objects that JSON was decoded to.

    Args:
        strict: refuse fields that would be ignored.

    Raises:
        OpenAIError: 404, the endpoint is unknown; 400, the body is not JSON, or a field has a wrong type or is refused.
    """
    endpoint = ENDPOINTS.get(path)
    if endpoint is None:
        raise OpenAIError(404, f"unknown endpoint {path}; available: {', '.join(ENDPOINTS)}", code="unknown_url")
    try:
        decoded, ignored = endpoint.decode_body(body, strict=strict)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise error_of(error) from error
    except RecursionError as error:
        raise OpenAIError(400, "the body is nested too deeply", code="invalid_json") from error
    if strict and ignored:
        raise bad_field(ignored[0], f"{ignored[0]} is not supported; leave it out", code="unknown_parameter")
    return Decoded(endpoint, decoded, ignored)


def prepare(path: str, body: bytes | Mapping[str, Any], parsers: Parsers | None = None) -> PreparedBody:
    """Translate ``body`` to requests of ``path``, for a model with these parsers.

    Raises:
        OpenAIError: as ``decode`` and ``Decoded.prepare``.
    """
    return decode(path, body).prepare(parsers or Parsers())
