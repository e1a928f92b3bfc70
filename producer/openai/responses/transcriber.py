"""Convert the deltas of a request to the response and its events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ....shared.errors import PenstockError, from_wire
from ....shared.messages.deltas import Delta
from ....shared.messages.outcome import FinishReason
from ..answers.form import AnswerParser
from ..answers.logprobs import chat_logprobs
from ..answers.pieces import Content, Piece, PieceReader, ReasoningPiece, piece_len
from ..errors import OpenAIError, error_of
from .objects import (
    Event,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
    Status,
)
from .offered_tools import OfferedTool
from .writer import Ending, ResponseWriter


class ParsingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for parsing the text of a request.

    Args:
        parser: a new parser, which splits text into reasoning, content and calls.
        call_id: returns the id of a call by its number.
        name_fields: converts an error for the caller.
        num_top_logprobs: None without log probabilities.
        tools: tools that the model may call, by the names of their functions.
    """

    parser: AnswerParser
    call_id: Callable[[int], str]
    name_fields: Callable[[PenstockError], OpenAIError] = error_of
    num_top_logprobs: int | None = None
    tools: Mapping[str, OfferedTool] = {}


class Transcriber:
    """Reads the deltas of one request from the first on, and derives the response and its events."""

    def __init__(self, response: Response, options: ParsingOptions, *, after: int = -1) -> None:
        self._writer = ResponseWriter(response, options.tools, after=after)
        self._options = options
        self._reader = PieceReader(options.parser, options.call_id)
        self._created_at = response.created_at
        # Log probabilities of tokens that are not part of a piece yet.
        self._logprobs: list[Any] = []
        self._num_unread_tokens = 0
        self._num_reasoning_tokens = 0.0

    @property
    def response(self) -> Response:
        """The response up to the last delta."""
        return self._writer.response

    def create(self) -> list[Event]:
        """Record that the request is queued."""
        return self._writer.create()

    def start(self) -> list[Event]:
        """Record that an engine has started the request."""
        return self._writer.start()

    def feed(self, delta: Delta) -> list[Event]:
        """Add a delta. If it carries an error, that ends the response."""
        if delta.error is not None:
            return self.fail(from_wire(delta.error.code, delta.error.message, delta.error.retryable))
        events = self._writer.start() if delta.token_ids else []
        pieces = self._reader.feed(delta)
        self._count_reasoning(delta, pieces)
        if self._options.num_top_logprobs is not None:
            self._logprobs += chat_logprobs(delta.logprobs, self._options.num_top_logprobs).content
            pieces = self._with_logprobs(pieces)
        events += self._writer.write(pieces)
        if delta.finish_reason is not None:
            events += self._writer.end(self._ending(delta, delta.finish_reason))
        return events

    def fail(self, error: PenstockError) -> list[Event]:
        """End the response with an error."""
        api_error = self._options.name_fields(error)
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(api_error.status, "server_error")
        return self._writer.end(Ending(status="failed", error=ResponseError(code, api_error.message)))

    def _count_reasoning(self, delta: Delta, pieces: list[Piece]) -> None:
        """Count reasoning tokens by the share of reasoning in the text. It is exact unless reasoning ends within the
        delta."""
        self._num_unread_tokens += len(delta.token_ids)
        num_chars = sum(map(piece_len, pieces))
        if num_chars:
            num_reasoning_chars = sum(piece_len(piece) for piece in pieces if isinstance(piece, ReasoningPiece))
            self._num_reasoning_tokens += self._num_unread_tokens * num_reasoning_chars / num_chars
            self._num_unread_tokens = 0

    def _with_logprobs(self, pieces: list[Piece]) -> list[Piece]:
        """Attach the log probabilities to their text. Those of reasoning and calls are dropped."""
        if not any(map(piece_len, pieces)):
            return pieces
        logprobs, self._logprobs = self._logprobs, []
        for i, piece in enumerate(pieces):
            if isinstance(piece, Content) and piece.text:
                return [*pieces[:i], Content(piece.text, logprobs), *pieces[i + 1 :]]
        return pieces

    def _ending(self, delta: Delta, reason: FinishReason) -> Ending:
        status, error = _ENDINGS[reason]
        completed_at = None
        if status == "completed" and delta.stats is not None:
            # The engine's time, so that it is the same in every reading.
            completed_at = self._created_at + round(delta.stats.latency_s)
        return Ending(
            status=status,
            error=None if error is None else ResponseError("server_error", error),
            incomplete_details=IncompleteDetails(_INCOMPLETE_REASONS[reason]) if status == "incomplete" else None,
            usage=self._usage(delta),
            completed_at=completed_at,
        )

    def _usage(self, delta: Delta) -> ResponseUsage | None:
        usage = delta.usage
        if usage is None:
            return None
        return ResponseUsage(
            input_tokens=usage.num_prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.num_cached_tokens),
            output_tokens=usage.num_output_tokens,
            output_tokens_details=OutputTokensDetails(round(self._num_reasoning_tokens)),
            total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
        )


# OpenAI has no deadlines, so "expired" is Penstock's.
_INCOMPLETE_REASONS = {FinishReason.LENGTH: "max_output_tokens", FinishReason.EXPIRED: "expired"}
_ENDINGS: dict[FinishReason, tuple[Status, str | None]] = {
    FinishReason.STOP: ("completed", None),
    FinishReason.REPETITION: ("completed", None),
    FinishReason.LENGTH: ("incomplete", None),
    FinishReason.CANCELLED: ("cancelled", None),
    FinishReason.ABORT: ("cancelled", None),
    FinishReason.EXPIRED: ("incomplete", None),
    FinishReason.ENGINE_LOST: ("failed", "the last engine that served the model has exited"),
    FinishReason.POISONED: ("failed", "engines died on this request; it is parked"),
    FinishReason.ERROR: ("failed", "the engine failed the request"),
}
