"""The results of requests, in vLLM's forms: generated outputs, and those of pooling models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from ..shared.errors import ClientClosedError, RequestFailedError, ValidationError
from ..shared.messages.deltas import Delta, SegmentEnd
from ..shared.messages.outcome import FinishReason, TokenLogprobs, Usage
from ..shared.params.pooling import Pooled
from ..shared.stats import RequestStats
from ..shared.values.arguments import CheckedNames
from ..shared.values.checks import check_text
from ..shared.values.shown import shown

T = TypeVar("T")


class CompletionOutput(msgspec.Struct, kw_only=True):
    """An answer to a request, or its new part.

    ``finish_reason`` is None while the answer is generated.
    ``logprobs`` has one entry per token, ``cumulative_logprob`` is the sum from the first token on; None unless
    requested.
    ``stats`` has the times of the request; None if it never reached an engine.
    ``segment_ends`` are those of streamed input, see ``Delta``.
    ``pooled`` is the result of a pooling request, instead of text and tokens.
    ``begins_in_reasoning`` says whether the text begins within the model's thinking, and ``text_ends`` where the text
    of each token ends, see ``Delta``.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    stats: RequestStats | None = None
    segment_ends: list[SegmentEnd] = []
    pooled: PoolingOutput | None = None
    weights_version: str = ""
    begins_in_reasoning: bool | None = None
    text_ends: list[int] = []

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct, kw_only=True):
    """A finished request, with ``n`` answers; ``usage`` counts its prompt once and the output tokens of all answers.

    ``Client.stream_outputs`` also yields outputs that are not ``finished``: their ``outputs`` hold the answers that
    have changed, and ``usage`` is None.
    ``prompt`` is the caller's prompt, or None if only the request_id is known. ``prompt_logprobs`` has one entry per
    token of the prompt, None for the first; None unless requested. ``first_prompt_token`` is then its id and its bytes.
    """

    request_id: str
    model: str
    prompt: object
    outputs: list[CompletionOutput]
    usage: Usage | None
    finished: bool = True
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    first_prompt_token: tuple[int, bytes] | None = None

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text

    @property
    def pooled(self) -> PoolingOutput | None:
        """The result of a pooling request; None for a request that generates."""
        return self.outputs[0].pooled


def final_output(request_id: str, model: str, prompt: object, wholes: Sequence[Delta]) -> RequestOutput:
    """Return the output of a finished request. ``wholes`` has one merged delta per answer."""
    return RequestOutput(
        request_id=request_id,
        model=model,
        prompt=prompt,
        outputs=[completion(index, whole) for index, whole in enumerate(wholes)],
        usage=usage_of([whole.usage for whole in wholes if whole.usage is not None]),
        prompt_logprobs=prompt_logprobs_of(wholes[0]),
        first_prompt_token=wholes[0].first_prompt_token,
    )


def completion(index: int, delta: Delta) -> CompletionOutput:
    """Return ``delta`` as the output of answer ``index``."""
    return CompletionOutput(
        index=index,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        cumulative_logprob=math.fsum(token.logprob for token in delta.logprobs) if delta.logprobs else None,
        logprobs=delta.logprobs or None,
        stats=delta.stats,
        segment_ends=delta.segment_ends,
        pooled=None if delta.pooled is None else PoolingOutput(pooled=delta.pooled),
        weights_version=delta.weights_version,
        begins_in_reasoning=delta.begins_in_reasoning,
        text_ends=delta.text_ends,
    )


def whole_delta(output: RequestOutput, completion: CompletionOutput) -> Delta:
    """Return one answer of a finished request as a single delta, for readers of deltas; see ``final_output``."""
    return Delta(
        token_ids=completion.token_ids,
        text=completion.text,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        usage=output.usage,
        logprobs=completion.logprobs or [],
        prompt_logprobs=[token for token in output.prompt_logprobs or () if token is not None],
        stats=completion.stats,
        first_prompt_token=output.first_prompt_token,
        begins_in_reasoning=completion.begins_in_reasoning,
        text_ends=completion.text_ends,
    )


def prompt_logprobs_of(delta: Delta) -> list[TokenLogprobs | None] | None:
    """Return one entry per token of the prompt, if ``delta`` has any."""
    return [None, *delta.prompt_logprobs] if delta.prompt_logprobs else None


def usage_of(each: Sequence[Usage]) -> Usage | None:
    """Sum the usage of answers. Their shared prompt is counted once; its cached tokens are those cached for all
    answers.
    """
    if not each:
        return None
    return Usage(
        num_prompt_tokens=max(usage.num_prompt_tokens for usage in each),
        num_output_tokens=sum(usage.num_output_tokens for usage in each),
        num_cached_tokens=min(usage.num_cached_tokens for usage in each),
        num_accepted_prediction_tokens=sum(usage.num_accepted_prediction_tokens for usage in each),
        num_rejected_prediction_tokens=sum(usage.num_rejected_prediction_tokens for usage in each),
    )


class TextPair(msgspec.Struct, metaclass=CheckedNames, frozen=True):
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


class DataPrompt(msgspec.Struct, metaclass=CheckedNames, frozen=True):
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
