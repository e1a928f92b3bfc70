"""From the deltas of a request to the response and its events."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import msgspec

from ....shared.errors import PenstockError, from_wire
from ....shared.messages.deltas import Delta
from ....shared.messages.outcome import FinishReason
from ..answers.logprobs import chat_logprobs
from ..answers.parts import AnswerParser, MessageParts, PlainText
from ..errors import OpenAIError, error_of
from .events import Event
from .objects import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
    Status,
)
from .pieces import CallArguments, CallStart, Content, Piece, Thought
from .writer import Ending, ResponseWriter


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How the text of a request is read.

    Args:
        parser: a fresh one, which tells thoughts, text and calls apart.
        call_id: makes the id of a call from its number.
        name_fields: makes what a caller is told of an error.
        num_top_logprobs: None if no log probabilities are told.
    """

    parser: AnswerParser
    call_id: Callable[[int], str]
    name_fields: Callable[[PenstockError], OpenAIError] = error_of
    num_top_logprobs: int | None = None


class Transcriber:
    """Reads the deltas of one request from its first, and tells what they make of the response.

    The parser gets the text character by character. What one call of it gives has no order among thought, text and
    tool calls, so a long text could be told in another order than its halves.
    """

    def __init__(self, response: Response, reading: Reading, *, after: int = -1) -> None:
        self._writer = ResponseWriter(response, after=after)
        self._reading = reading
        self._parser = reading.parser
        self._created_at = response.created_at
        # Of tokens that have made no piece yet.
        self._logprobs: list[Any] = []
        self._num_unread_tokens = 0
        self._num_reasoning_tokens = 0.0

    @property
    def response(self) -> Response:
        """The response as far as it has been told."""
        return self._writer.response

    def create(self) -> list[Event]:
        """The request is in line."""
        return self._writer.create()

    def start(self) -> list[Event]:
        """An engine has it."""
        return self._writer.start()

    def take(self, delta: Delta) -> list[Event]:
        """More has come of it; an error that the delta carries is the response's end."""
        if delta.error is not None:
            return self.fail(from_wire(delta.error.code, delta.error.message, delta.error.retryable))
        if delta.begins_in_reasoning is not None:
            self._parser.begin(in_reasoning=delta.begins_in_reasoning)
        events = self._writer.start() if delta.token_ids else []
        pieces = self._pieces(delta.text)
        if delta.finish_reason is not None:
            pieces += self._in_order(self._parser.finish(is_cut=delta.finish_reason != FinishReason.STOP))
        pieces = _joined(pieces)
        self._count(delta, pieces)
        if self._reading.num_top_logprobs is not None:
            self._logprobs += chat_logprobs(delta.logprobs, self._reading.num_top_logprobs).content
            pieces = self._with_logprobs(pieces)
        events += self._writer.write(pieces)
        if delta.finish_reason is not None:
            events += self._writer.end(self._ending(delta, delta.finish_reason))
        return events

    def fail(self, error: PenstockError) -> list[Event]:
        """It has ended without an answer."""
        told = self._reading.name_fields(error)
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(told.status, "server_error")
        return self._writer.end(Ending(status="failed", error=ResponseError(code, told.message)))

    def _pieces(self, text: str) -> list[Piece]:
        if isinstance(self._parser, PlainText):
            return [Content(text)]
        return [piece for char in text for piece in self._in_order(self._parser.feed(char))]

    def _in_order(self, parts: MessageParts) -> list[Piece]:
        """What a parser gives at once, in the order in which models write it."""
        pieces: list[Piece] = [Thought(parts.reasoning), Content(parts.content)]
        for call in parts.tool_calls:
            if name := call["function"].get("name"):
                pieces.append(CallStart(name, self._reading.call_id(call["index"])))
            pieces.append(CallArguments(call["function"]["arguments"]))
        return [piece for piece in pieces if isinstance(piece, CallStart) or piece.text]

    def _count(self, delta: Delta, pieces: list[Piece]) -> None:
        """Thoughts get their share of the tokens by their share of the text; it is exact unless they end in between."""
        self._num_unread_tokens += len(delta.token_ids)
        num_chars = sum(map(_num_chars, pieces))
        if num_chars:
            num_thought = sum(_num_chars(piece) for piece in pieces if isinstance(piece, Thought))
            self._num_reasoning_tokens += self._num_unread_tokens * num_thought / num_chars
            self._num_unread_tokens = 0

    def _with_logprobs(self, pieces: list[Piece]) -> list[Piece]:
        """Hand the log probabilities to the text that they belong to; those of thoughts and calls are not told."""
        if not any(map(_num_chars, pieces)):
            return pieces
        logprobs, self._logprobs = self._logprobs, []
        for i, piece in enumerate(pieces):
            if isinstance(piece, Content) and piece.text:
                return [*pieces[:i], Content(piece.text, logprobs), *pieces[i + 1 :]]
        return pieces

    def _ending(self, delta: Delta, reason: FinishReason) -> Ending:
        status, error = _END_OF[reason]
        completed_at = None
        if status == "completed" and delta.stats is not None:
            # By the engine's word, so that it is the same in every reading.
            completed_at = self._created_at + round(delta.stats.latency_s)
        return Ending(
            status=status,
            error=None if error is None else ResponseError("server_error", error),
            incomplete_details=IncompleteDetails(_CUT_BY[reason]) if status == "incomplete" else None,
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


# OpenAI knows no deadlines, so the second word is our own.
_CUT_BY = {FinishReason.LENGTH: "max_output_tokens", FinishReason.EXPIRED: "expired"}
_END_OF: dict[FinishReason, tuple[Status, str | None]] = {
    FinishReason.STOP: ("completed", None),
    FinishReason.REPETITION: ("completed", None),
    FinishReason.LENGTH: ("incomplete", None),
    FinishReason.CANCELLED: ("cancelled", None),
    FinishReason.ABORT: ("cancelled", None),
    FinishReason.EXPIRED: ("incomplete", None),
    FinishReason.ENGINE_LOST: ("failed", "the last engine that served the model is gone"),
    FinishReason.POISONED: ("failed", "engines died on this request; it is parked"),
    FinishReason.ERROR: ("failed", "the engine failed the request"),
}


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Make one piece of neighbours of a kind."""
    joined: list[Piece] = []
    for kind, neighbours in groupby(pieces, type):
        if kind is CallStart:
            joined += neighbours
        else:
            joined.append(kind("".join(map(_text, neighbours))))
    return joined


def _num_chars(piece: Piece) -> int:
    return len(_text(piece))


def _text(piece: Piece) -> str:
    return piece.name if isinstance(piece, CallStart) else piece.text
