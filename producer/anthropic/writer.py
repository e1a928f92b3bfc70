"""Converts the pieces of an answer to content blocks, and to the events that open, extend and close them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from ..openai.answers.pieces import CallArguments, CallStart, Content, Piece, ReasoningPiece
from .objects import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    EndDelta,
    Event,
    InputDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    SignatureDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)

NumberedEvent = tuple[int, Event]


class MessageWriter:
    """Writes one message. Each method returns the resulting events with their numbers.

    One block is open at a time. The number of an event counts the events and the characters of deltas up to it. So it
    does not depend on how the text was cut into deltas, and a second reader can begin after any of them.

    Args:
        after: number of the last event that the reader has. Events up to it are omitted, and deltas begin after it.
        shows_thinking: whether thinking blocks have their text.
    """

    def __init__(self, message_id: str, model: str, *, after: int = 0, shows_thinking: bool = True) -> None:
        self._id, self._model = message_id, model
        self._after = after
        self._shows_thinking = shows_thinking
        self._last_number = 0
        self._open: _OpenBlock | None = None
        self._content: list[Block] = []

    def start_message(self, usage: Usage) -> list[NumberedEvent]:
        """Start the message. Has no effect the second time."""
        return [] if self._last_number else self._numbered([MessageStart(self.message_with(usage))])

    def write_pieces(self, pieces: Iterable[Piece]) -> list[NumberedEvent]:
        """Add generated pieces."""
        events: list[NumberedEvent] = []
        for piece in pieces:
            starts_call = isinstance(piece, CallStart)
            if not starts_call and not piece.text:
                continue
            if self._open is None or not self._open.accepts(piece):
                events += self._close_block()
                events += self._open_block(_OpenBlock(piece, len(self._content)))
            if not starts_call:
                events += self._extend_block(piece.text)
        return events

    def end_content(self) -> list[NumberedEvent]:
        """End the last block. Without any output there is an empty text block."""
        events = [] if self._open or self._content else self._open_block(_OpenBlock(Content(""), 0))
        return events + self._close_block()

    def end_message(self, stop_reason: StopReason, stop_sequence: str | None, usage: Usage) -> list[NumberedEvent]:
        """End the message, after its content."""
        delta = EndDelta(stop_reason=stop_reason, stop_sequence=stop_sequence)
        return self._numbered([MessageDelta(delta=delta, usage=usage), MessageStop()])

    @property
    def has_calls(self) -> bool:
        """Whether a completed block is a call."""
        return any(isinstance(block, ToolUseBlock) for block in self._content)

    def message_with(
        self, usage: Usage, stop_reason: StopReason | None = None, stop_sequence: str | None = None
    ) -> Message:
        """Return the message with its completed blocks."""
        return Message(
            id=self._id,
            model=self._model,
            content=list(self._content),
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=usage,
        )

    def _open_block(self, block: _OpenBlock) -> list[NumberedEvent]:
        self._open = block
        return self._numbered([BlockStart(index=block.index, content_block=block.empty())])

    def _extend_block(self, text: str) -> list[NumberedEvent]:
        assert self._open is not None
        if self._open.is_thinking and not self._shows_thinking:
            return []
        self._open.text += text
        num_skipped = max(0, self._after - self._last_number)
        self._last_number += len(text)
        rest = text[num_skipped:]
        return [(self._last_number, BlockDelta(index=self._open.index, delta=self._open.delta(rest)))] if rest else []

    def _close_block(self) -> list[NumberedEvent]:
        block, self._open = self._open, None
        if block is None:
            return []
        events: list[Event] = [BlockStop(block.index)]
        signature = ""
        if block.is_thinking:
            signature = hashlib.sha256(f"{self._id}/{block.index}".encode()).hexdigest()
            events.insert(0, BlockDelta(index=block.index, delta=SignatureDelta(signature)))
        self._content.append(block.whole(signature))
        return self._numbered(events)

    def _numbered(self, events: list[Event]) -> list[NumberedEvent]:
        """Return the events with their numbers, without those that the reader has."""
        numbered = list(enumerate(events, self._last_number + 1))
        self._last_number += len(events)
        return [(number, event) for number, event in numbered if number > self._after]


class _OpenBlock:
    """A block that is being written, and starts with the piece ``first``."""

    def __init__(self, first: Piece, index: int) -> None:
        self.index = index
        self.call = first if isinstance(first, CallStart) else None
        self.is_thinking = isinstance(first, ReasoningPiece)
        self.text = ""

    def accepts(self, piece: Piece) -> bool:
        """Return whether a piece belongs to the block."""
        if self.call is not None:
            return isinstance(piece, CallArguments)
        return isinstance(piece, ReasoningPiece if self.is_thinking else Content)

    def empty(self) -> Block:
        if self.call is not None:
            return ToolUseBlock(self.call.call_id, self.call.name, {})
        return ThinkingBlock("", "") if self.is_thinking else TextBlock("")

    def delta(self, text: str) -> TextDelta | ThinkingDelta | InputDelta:
        """Return the delta that adds ``text``."""
        if self.call is not None:
            return InputDelta(text)
        return ThinkingDelta(text) if self.is_thinking else TextDelta(text)

    def whole(self, signature: str) -> Block:
        """Return the block with its whole text. A call whose input is no object is text, because a limit cut it."""
        if self.call is None:
            return ThinkingBlock(self.text, signature) if self.is_thinking else TextBlock(self.text)
        try:
            arguments = json.loads(self.text or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return TextBlock(f"{self.call.name} {self.text}")
        return ToolUseBlock(self.call.call_id, self.call.name, arguments)
