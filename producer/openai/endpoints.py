"""From the path and body of a request to what to ask of the client: the seam of gateway, batches and responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ...shared.errors import PenstockError
from .chat import ChatCompletionBody, prepare_chat
from .completions import CompletionBody, prepare_completion
from .embeddings import EmbeddingsBody, prepare_embeddings
from .errors import OpenAIError, error_of
from .parsers import Parsers
from .prepared import Prepared

CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


ParsersOf = Callable[[str | None], Parsers]
"""Which parsers read the answers of the model that a body names."""


class Endpoint(msgspec.Struct, frozen=True):
    """How the bodies of one path are read, and what is made of them."""

    body: type[msgspec.Struct]
    prepare: Callable[[Any, Parsers], Prepared]
    decode: Callable[[bytes], Any]


def _endpoint(body: type[msgspec.Struct], prepare: Callable[[Any, Parsers], Prepared]) -> Endpoint:
    return Endpoint(body, prepare, msgspec.json.Decoder(body).decode)


def _default_parsers(model: str | None) -> Parsers:
    return Parsers()


ENDPOINTS: Mapping[str, Endpoint] = {
    CHAT_COMPLETIONS: _endpoint(ChatCompletionBody, prepare_chat),
    COMPLETIONS: _endpoint(CompletionBody, lambda body, _: prepare_completion(body)),
    EMBEDDINGS: _endpoint(EmbeddingsBody, lambda body, _: prepare_embeddings(body)),
}


def prepare(path: str, body: bytes | Mapping[str, Any], parsers_of: ParsersOf = _default_parsers) -> Prepared:
    """Return what ``body`` asks of ``path``: JSON, or what JSON was decoded to.

    ``parsers_of`` tells how answers of its model are read: ``ParserChoice.among`` the cards of the models served.

    Raises:
        OpenAIError: 404, there is no such endpoint; 400, the body is no JSON or a field is wrong, which is named.
    """
    endpoint = ENDPOINTS.get(path)
    if endpoint is None:
        raise OpenAIError(404, f"there is no endpoint {path}; there are {', '.join(ENDPOINTS)}", code="unknown_url")
    try:
        decoded = endpoint.decode(body) if isinstance(body, bytes) else msgspec.convert(body, endpoint.body)
        return endpoint.prepare(decoded, parsers_of(decoded.model))
    except (PenstockError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise error_of(error) from error
