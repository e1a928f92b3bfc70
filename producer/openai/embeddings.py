"""POST /v1/embeddings: the body, its requests, and the response."""

from __future__ import annotations

from typing import Literal

import msgspec

from ...shared.errors import ClientClosedError
from ..results.outputs import RequestOutput
from ..results.pooling import PoolingOutput, PoolingRequestOutput
from .answers.common import created_at, finish_reason_of
from .pooling import Input, Listed, PoolingBody, PoolingUsage, PreparedPooling, encode_vector

ID_PREFIX = "embd"


class EmbeddingsBody(PoolingBody, kw_only=True, forbid_unknown_fields=True):
    """The request: a text, token ids, or a list of either."""

    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class Embedding(msgspec.Struct):
    """A vector: numbers, or their little-endian ``float32`` bytes in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Embeddings(Listed[Embedding], kw_only=True):
    """The response."""


class PreparedEmbeddings(PreparedPooling, kw_only=True, frozen=True):
    """A checked body. ``is_base64``: vectors are returned in base64."""

    is_base64: bool

    def answer(self, *outputs: RequestOutput | PoolingRequestOutput, response_id: str | None = None) -> Embeddings:
        """Return the body of the response; see ``PreparedBody.answer``."""
        response_id = outputs[0].request_id if response_id is None else response_id
        vectors = [encode_vector(_pooled_of(output).pooled, is_base64=self.is_base64) for output in outputs]
        return Embeddings(
            id=response_id,
            created=created_at(response_id),
            model=self.model or outputs[0].model,
            data=[Embedding(index, vector) for index, vector in enumerate(vectors)],
            usage=PoolingUsage.sum_of(outputs),
        )


def prepare_embeddings(body: EmbeddingsBody) -> PreparedEmbeddings:
    """Translate the body to requests.

    Raises:
        OpenAIError: 400, a field is invalid; it is named.
        ValidationError: a value is out of range; the message names the field.
    """
    prepared = body.prepared(ID_PREFIX, body.input, body.pooling_params("embed", dimensions=body.dimensions))
    fields = {name: getattr(prepared, name) for name in prepared.__struct_fields__}
    return PreparedEmbeddings(**fields, is_base64=body.encoding_format == "base64")


def _pooled_of(output: RequestOutput | PoolingRequestOutput) -> PoolingOutput:
    """Return the result of one prompt.

    Raises:
        OpenAIError: it has no result, because it was cancelled or expired.
    """
    if output.pooled is None and isinstance(output, RequestOutput):
        finish_reason_of(output.outputs[0].finish_reason, has_output=False)
    if output.pooled is None:
        raise ClientClosedError(f"request {output.request_id} ended without a result")
    return output.pooled
