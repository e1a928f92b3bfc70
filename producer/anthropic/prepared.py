"""A checked message request, and the conversion of its deltas to the message and its events."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ...shared.errors import ValidationError
from ...shared.messages.deltas import Delta
from ...shared.messages.outcome import FinishReason
from ...shared.messages.outcome import Usage as TokenCounts
from ..openai.answers.common import finish_reason_of
from ..openai.answers.pieces import PieceReader, ReasoningPiece, piece_len
from ..openai.chat import PreparedChat, prepare_chat
from ..openai.errors import OpenAIError, error_of
from ..openai.parsers import Parsers
from ..openai.prepared import Prepared
from ..results import RequestOutput, whole_delta
from .body import FieldNames, MessagesBody, chat_body
from .objects import Message, OutputTokensDetails, StopReason, Usage
from .writer import MessageWriter, NumberedEvent


class PreparedMessage(Prepared, kw_only=True, frozen=True):
    """A checked message request, and the chat completion that runs it."""

    id_prefix: str = "msg_"
    chat: PreparedChat
    names: FieldNames
    shows_thinking: bool

    @contextmanager
    def naming_fields(self) -> Generator[None]:
        """Raise an engine's refusal within this block with the body's names of fields; see ``Prepared``."""
        try:
            with self.chat.naming_fields():
                yield
        except (ValidationError, OpenAIError) as error:
            raise self.names.renamed(error_of(error)) from error

    def transcriber(self, message_id: str, model: str, *, after: int = 0) -> MessageTranscriber:
        """Return a transcriber that starts at the first delta, and omits the events up to number ``after``."""
        return MessageTranscriber(self, message_id, model, after=after)

    def answer(self, *outputs: RequestOutput, response_id: str | None = None) -> Message:
        """Return the response to one output; see ``Prepared.answer``."""
        (output,) = outputs
        (completion,) = output.outputs
        transcriber = self.transcriber(response_id or output.request_id, self.model or output.model)
        transcriber.feed(whole_delta(output, completion))
        assert transcriber.message is not None
        return transcriber.message


def prepare_message(body: MessagesBody, parsers: Parsers) -> PreparedMessage:
    """Translate a message request to a request, for a model with these parsers.

    Raises:
        OpenAIError: 400, a field is invalid; it has the name used in the body.
    """
    converted, names = chat_body(body)
    try:
        chat = prepare_chat(converted, parsers)
    except (ValidationError, OpenAIError) as error:
        raise names.renamed(error_of(error)) from error
    return PreparedMessage(
        prompts=chat.prompts,
        params=chat.params,
        options=chat.options,
        stream=chat.stream,
        chat=chat,
        names=names,
        shows_thinking=body.shows_thinking,
    )


class MessageTranscriber:
    """Reads the deltas of one request from the first on, and derives the message and its events.

    Attributes:
        message: the whole message, after its end.
    """

    def __init__(self, prepared: PreparedMessage, message_id: str, model: str, *, after: int = 0) -> None:
        self._max_tokens = prepared.params.max_tokens
        style = prepared.chat.style
        self._reader = PieceReader(prepared.chat.make_parser(), lambda index: style.call_id(message_id, 0, index))
        self._writer = MessageWriter(message_id, model, after=after, shows_thinking=prepared.shows_thinking)
        self._num_chars = self._num_thinking_chars = 0
        self.message: Message | None = None

    def feed(self, delta: Delta) -> list[NumberedEvent]:
        """Add a delta.

        Raises:
            OpenAIError: the request was cancelled, or expired before it had any output.
        """
        finish_reason_of(delta.finish_reason, has_output=delta.next_index > 0)
        events: list[NumberedEvent] = []
        counts = delta.prompt_usage or delta.usage
        if delta.token_ids or counts is not None:
            # An engine of an earlier release does not count the prompt before the end.
            events += self._writer.start_message(self._usage(counts or TokenCounts(), num_output_tokens=0))
        pieces = self._reader.feed(delta)
        self._num_chars += sum(map(piece_len, pieces))
        self._num_thinking_chars += sum(piece_len(piece) for piece in pieces if isinstance(piece, ReasoningPiece))
        events += self._writer.write_pieces(pieces)
        if delta.finish_reason is not None:
            events += self._end(delta, delta.finish_reason)
        return events

    def _end(self, delta: Delta, reason: FinishReason) -> list[NumberedEvent]:
        counts = delta.usage or TokenCounts()
        events = self._writer.end_content()
        stop_reason = self._stop_reason(delta, reason, counts.num_output_tokens)
        stop_sequence = delta.stop_reason if stop_reason == "stop_sequence" else None
        assert isinstance(stop_sequence, str | None)
        usage = self._usage(counts, num_output_tokens=counts.num_output_tokens)
        self.message = self._writer.message_with(usage, stop_reason, stop_sequence)
        return events + self._writer.end_message(stop_reason, stop_sequence, usage)

    def _stop_reason(self, delta: Delta, reason: FinishReason, num_output_tokens: int) -> StopReason:
        if reason in (FinishReason.STOP, FinishReason.REPETITION):
            if self._writer.has_calls:
                return "tool_use"
            is_string = reason == FinishReason.STOP and isinstance(delta.stop_reason, str)
            return "stop_sequence" if is_string else "end_turn"
        is_full = reason == FinishReason.LENGTH and (self._max_tokens is None or num_output_tokens < self._max_tokens)
        return "model_context_window_exceeded" if is_full else "max_tokens"

    def _usage(self, counts: TokenCounts, *, num_output_tokens: int) -> Usage:
        thinking_share = self._num_thinking_chars / self._num_chars if self._num_chars else 0.0
        return Usage(
            input_tokens=counts.num_prompt_tokens - counts.num_cached_tokens,
            cache_read_input_tokens=counts.num_cached_tokens,
            output_tokens=num_output_tokens,
            output_tokens_details=OutputTokensDetails(round(num_output_tokens * thinking_share)),
        )
