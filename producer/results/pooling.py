"""Outputs of pooling requests, in vLLM's forms."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from ...shared.errors import ClientClosedError, RequestFailedError, ValidationError
from ...shared.messages.deltas import Delta
from ...shared.messages.outcome import Usage
from ...shared.params.pooling import Pooled
from ...shared.values.checks import check_text
from ...shared.values.shown import shown

T = TypeVar("T")


class TextPair(msgspec.Struct, frozen=True):
    """Two texts that a model judges together: a prompt of ``encode``.

    Raises:
        ValidationError: a value is not text, or empty.
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
        data: in the form that the processor expects.
        io_processor: its name; may be left out if the client has only one.
    """

    data: Any
    io_processor: str | None = None


class PoolingOutput(msgspec.Struct, kw_only=True):
    """The pooled result of a prompt.

    ``pooled`` has the numbers as received: ``numpy.frombuffer(output.pooled.data, "<f4")`` does not copy them.
    """

    pooled: Pooled

    @property
    def data(self) -> list[float] | list[list[float]]:
        """The vector, or a list of one vector per token."""
        floats, shape = self.pooled.floats().tolist(), self.pooled.shape
        if len(shape) == 1:
            return floats
        size = shape[1]
        return [floats[start : start + size] for start in range(0, len(floats), size)]

    @property
    def vector(self) -> list[float]:
        """The single vector.

        Raises:
            ValidationError: the result has a vector for each token.
        """
        if len(self.pooled.shape) != 1:
            raise ValidationError(f"the result has a vector for each of {self.pooled.shape[0]} tokens; see data")
        return self.pooled.floats().tolist()


class _FinishedRequest(msgspec.Struct, Generic[T], kw_only=True):
    """A finished request; ``outputs`` is its result."""

    request_id: str
    model: str
    prompt: object
    outputs: T
    usage: Usage | None = None
    finished: bool = True


class PoolingRequestOutput(_FinishedRequest[PoolingOutput], kw_only=True):
    """A finished pooling request."""

    @property
    def pooled(self) -> PoolingOutput:
        """The result, by the name that it has in a ``RequestOutput``."""
        return self.outputs


class ProcessedRequestOutput(_FinishedRequest[Any], kw_only=True):
    """The answer of an I/O processor from the outputs of its prompts; ``usage`` counts the tokens of all prompts."""


class EmbeddingOutput(msgspec.Struct, kw_only=True):
    """The embedding of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Size of the embedding."""
        return len(self.embedding)


class ClassificationOutput(msgspec.Struct, kw_only=True):
    """A number for each class: its probability, unless ``use_activation`` was False."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ScoringOutput(msgspec.Struct, kw_only=True):
    """The score of two texts: how well they match."""

    score: float


class EmbeddingRequestOutput(_FinishedRequest[EmbeddingOutput], kw_only=True):
    """The embedding of a text."""


class ClassificationRequestOutput(_FinishedRequest[ClassificationOutput], kw_only=True):
    """The classes of a text."""


class ScoringRequestOutput(_FinishedRequest[ScoringOutput], kw_only=True):
    """The score of two texts, which are ``prompt``."""


def output_of(request_id: str, model: str, prompt: object, last: Delta | None) -> PoolingRequestOutput:
    """Return the output of the only record of a request.

    Raises:
        ClientClosedError: there is no record.
        RequestFailedError: it ended without a result; the code is its finish reason, "cancelled" or "expired".
    """
    if last is None:
        raise ClientClosedError(f"request {shown(request_id)} was left without an end")
    if last.pooled is None:
        message = f"request {shown(request_id)} ended without a result: {last.finish_reason}"
        raise RequestFailedError(message, code=str(last.finish_reason))
    return PoolingRequestOutput(
        request_id=request_id,
        model=model,
        prompt=prompt,
        outputs=PoolingOutput(pooled=last.pooled),
        usage=last.usage,
    )
