"""Outputs of pooling requests, in vLLM's shapes."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from ...shared.errors import ClientClosedError, RequestFailedError, ValidationError
from ...shared.messages.deltas import Delta
from ...shared.messages.outcome import Usage
from ...shared.params.pooling import Pooled
from ...shared.values.encodable import check_text
from ...shared.values.shown import shown

T = TypeVar("T")


class TextPair(msgspec.Struct, frozen=True):
    """Two texts that a model judges together: a prompt of ``encode``.

    Raises:
        ValidationError: one is no text, or empty.
    """

    text: str
    text_pair: str

    def __post_init__(self) -> None:
        for name in ("text", "text_pair"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValidationError(f"{name} must be a text that is not empty, got {shown(value)}")
            check_text(name, value)


class DataPrompt(msgspec.Struct, frozen=True):
    """Data that an I/O processor turns into prompts: a prompt of ``encode``.

    Args:
        data: of whatever form that processor takes.
        io_processor: its name; may be left out where the client has only one.
    """

    data: Any
    io_processor: str | None = None


class PoolingOutput(msgspec.Struct, kw_only=True):
    """What a prompt was pooled to.

    ``pooled`` has the numbers as they came: ``numpy.frombuffer(output.pooled.data, "<f4")`` costs no copy.
    """

    pooled: Pooled

    @property
    def data(self) -> list[float] | list[list[float]]:
        """One vector, or one per token."""
        floats, shape = self.pooled.floats().tolist(), self.pooled.shape
        if len(shape) == 1:
            return floats
        size = shape[1]
        return [floats[start : start + size] for start in range(0, len(floats), size)]

    @property
    def vector(self) -> list[float]:
        """The one vector.

        Raises:
            ValidationError: there is one for each token.
        """
        if len(self.pooled.shape) != 1:
            raise ValidationError(f"the result has a vector for each of {self.pooled.shape[0]} tokens; see data")
        return self.pooled.floats().tolist()


class _Ended(msgspec.Struct, Generic[T], kw_only=True):
    """A finished request; ``outputs`` is its result."""

    request_id: str
    model: str
    prompt: object
    outputs: T
    usage: Usage | None = None
    finished: bool = True


class PoolingRequestOutput(_Ended[PoolingOutput], kw_only=True):
    """A finished pooling request."""

    @property
    def pooled(self) -> PoolingOutput:
        """Its result, as a ``RequestOutput`` of a detached request calls it."""
        return self.outputs


class ProcessedRequestOutput(_Ended[Any], kw_only=True):
    """What an I/O processor has made of the outputs of its prompts; ``usage`` counts the tokens of all."""


class EmbeddingOutput(msgspec.Struct, kw_only=True):
    """The embedding of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


class ClassificationOutput(msgspec.Struct, kw_only=True):
    """A number for each class: its probability, unless ``use_activation`` was False."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ScoringOutput(msgspec.Struct, kw_only=True):
    """How well two texts go together."""

    score: float


class EmbeddingRequestOutput(_Ended[EmbeddingOutput], kw_only=True):
    """A text's embedding."""


class ClassificationRequestOutput(_Ended[ClassificationOutput], kw_only=True):
    """A text's classes."""


class ScoringRequestOutput(_Ended[ScoringOutput], kw_only=True):
    """The score of two texts, which are ``prompt``."""


def output_of(request_id: str, model: str, prompt: object, last: Delta | None) -> PoolingRequestOutput:
    """Return what the only record of a request says.

    Raises:
        ClientClosedError: there is none.
        RequestFailedError: it ended without a result; the code is its finish reason, "cancelled" or "expired".
    """
    if last is None:
        raise ClientClosedError(f"request {shown(request_id)} was left without an end")
    if last.pooled is None:
        told = f"request {shown(request_id)} ended without a result: {last.finish_reason}"
        raise RequestFailedError(told, code=str(last.finish_reason))
    return PoolingRequestOutput(
        request_id=request_id,
        model=model,
        prompt=prompt,
        outputs=PoolingOutput(pooled=last.pooled),
        usage=last.usage,
    )
