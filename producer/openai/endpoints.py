"""From the path and body of a request to what to ask of the client: the seam of gateway, batches and responses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ...shared.errors import PenstockError
from .chat import ChatCompletionBody, prepare_chat
from .completions import CompletionBody, prepare_completion
from .embeddings import EmbeddingsBody, prepare_embeddings
from .errors import OpenAIError, error_of
from .neutral import OF_CHAT, OF_COMPLETIONS, OF_RESPONSES, Neutral, without_neutral
from .parsers import Parsers
from .prepared import PreparedBody
from .responses.body import ResponseBody
from .responses.rows import prepare_row

CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
# Of a response that stands alone; what is kept is the Responses API's: see ``responses.service``.
RESPONSES = "/v1/responses"


class Endpoint(msgspec.Struct, frozen=True):
    """How the bodies of one path are read, and what is made of them; ``neutral`` are values of fields it has not."""

    body: type[msgspec.Struct]
    prepare: Callable[[Any, Parsers], PreparedBody]
    decode: Callable[[bytes], Any]
    neutral: Neutral

    def read(self, body: bytes | Mapping[str, Any]) -> Any:
        """Return the body's struct.

        Raises:
            msgspec.MsgspecError: it is no JSON, or not of the form that is asked for.
        """
        try:
            return self.decode(body) if isinstance(body, bytes) else self._convert(body)
        except msgspec.ValidationError:
            plain = msgspec.json.decode(body) if isinstance(body, bytes) else body
            if not isinstance(plain, Mapping):
                raise
            reduced = without_neutral(plain, frozenset(self.body.__struct_fields__), self.neutral)
            if len(reduced) == len(plain):
                raise
            return self._convert(reduced)

    def _convert(self, body: Mapping[str, Any]) -> Any:
        return msgspec.convert(body, self.body, str_keys=True)  # JSON has no other keys, whatever they stand for


def _endpoint(
    body: type[msgspec.Struct], prepare: Callable[[Any, Parsers], PreparedBody], neutral: Neutral
) -> Endpoint:
    return Endpoint(body, prepare, msgspec.json.Decoder(body).decode, neutral)


ENDPOINTS: Mapping[str, Endpoint] = {
    CHAT_COMPLETIONS: _endpoint(ChatCompletionBody, prepare_chat, OF_CHAT),
    COMPLETIONS: _endpoint(CompletionBody, lambda body, _: prepare_completion(body), OF_COMPLETIONS),
    EMBEDDINGS: _endpoint(EmbeddingsBody, lambda body, _: prepare_embeddings(body), {}),
    RESPONSES: _endpoint(ResponseBody, prepare_row, OF_RESPONSES),
}


class Decoded(msgspec.Struct, frozen=True):
    """A body that has the form of its path's bodies; what it says was not looked at yet."""

    endpoint: Endpoint
    body: Any

    @property
    def model(self) -> str | None:
        """The model that it names."""
        return self.body.model or None

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits that two bodies share only if they say the same, in whatever order and spacing."""
        said = msgspec.json.encode(msgspec.to_builtins(self.body, str_keys=True), order="deterministic")
        return hashlib.blake2b(said, digest_size=4).hexdigest()

    def prepare(self, parsers: Parsers) -> PreparedBody:
        """Return what it asks of a model whose answers ``parsers`` read.

        Raises:
            OpenAIError: 400, a field is wrong, which is named.
        """
        try:
            return self.endpoint.prepare(self.body, parsers)
        except PenstockError as error:
            raise error_of(error) from error


def decode(path: str, body: bytes | Mapping[str, Any]) -> Decoded:
    """Return the body for ``path``: JSON, or what JSON was decoded to.

    Raises:
        OpenAIError: 404, there is no such endpoint; 400, the body is no JSON, or a field is unknown or of another type.
    """
    endpoint = ENDPOINTS.get(path)
    if endpoint is None:
        raise OpenAIError(404, f"there is no endpoint {path}; there are {', '.join(ENDPOINTS)}", code="unknown_url")
    try:
        return Decoded(endpoint, endpoint.read(body))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise error_of(error) from error
    except RecursionError as error:
        raise OpenAIError(400, "the body is nested too deep", code="invalid_json") from error


def prepare(path: str, body: bytes | Mapping[str, Any], parsers: Parsers | None = None) -> PreparedBody:
    """Return what ``body`` asks of ``path``, and of a model whose answers ``parsers`` read.

    Raises:
        OpenAIError: as ``decode`` and ``Decoded.prepare``.
    """
    return decode(path, body).prepare(parsers or Parsers())
