"""POST /v1/embeddings: the body, which is checked; there is no model yet that could answer it."""

from __future__ import annotations

from typing import Literal, NoReturn

import msgspec

from .errors import OpenAIError, bad_field


class EmbeddingsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The request."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None


def prepare_embeddings(body: EmbeddingsBody) -> NoReturn:
    """Refuse a request for embeddings, a wrong one by its field.

    Raises:
        OpenAIError: 400 in any case.
    """
    if not body.input:
        raise bad_field("input", "input must not be empty")
    if body.dimensions is not None and body.dimensions < 1:
        raise bad_field("dimensions", f"dimensions must be at least 1, got {body.dimensions}")
    raise OpenAIError(
        400,
        "this version serves models that generate; none that is served here makes embeddings",
        param="model",
        code="model_not_supported",
    )
