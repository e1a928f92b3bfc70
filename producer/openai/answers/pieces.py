"""Pieces of an answer in the order in which the model wrote them: reasoning, text, and calls of tools."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import msgspec

from ....shared.messages.deltas import Delta
from ....shared.messages.outcome import FinishReason
from .form import AnswerParser, PlainText
from .parts import MessageParts


class ReasoningPiece(msgspec.Struct, frozen=True):
    """More of the model's reasoning."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """More of the answer's text. ``logprobs`` are those of its tokens, if requested."""

    text: str
    logprobs: list[Any] = []


class CallStart(msgspec.Struct, frozen=True):
    """Start of a call of the function ``name``; its arguments follow. ``call_id`` has the form that the model's
    template accepts."""

    name: str
    call_id: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the arguments of the last call."""

    text: str


Piece = ReasoningPiece | Content | CallStart | CallArguments


class PieceReader:
    """Reads the deltas of one answer from the first on.

    The parser gets the text character by character, because the parts that one call returns have no order among
    reasoning, text and tool calls. Otherwise a long text could be ordered differently from its halves.

    Args:
        parser: a new parser, which splits text into reasoning, content and calls.
        call_id: returns the id of a call by its number.
    """

    def __init__(self, parser: AnswerParser, call_id: Callable[[int], str]) -> None:
        self._parser = parser
        self._call_id = call_id

    def feed(self, delta: Delta) -> list[Piece]:
        """Return the pieces that ``delta`` makes certain; neighbouring ones of the same type are joined."""
        if delta.begins_in_reasoning is not None:
            self._parser.begin(in_reasoning=delta.begins_in_reasoning)
        pieces = self._pieces(delta.text)
        if delta.finish_reason is not None:
            pieces += self._in_order(self._parser.finish(is_cut=delta.finish_reason != FinishReason.STOP))
        return _joined(pieces)

    def _pieces(self, text: str) -> list[Piece]:
        if isinstance(self._parser, PlainText):
            return [Content(text)]
        return [piece for char in text for piece in self._in_order(self._parser.feed(char))]

    def _in_order(self, parts: MessageParts) -> list[Piece]:
        """Return the parts of one call of the parser in the order in which models write them."""
        pieces: list[Piece] = [ReasoningPiece(parts.reasoning), Content(parts.content)]
        for call in parts.tool_calls:
            if name := call["function"].get("name"):
                pieces.append(CallStart(name, call.get("id") or self._call_id(call["index"])))
            pieces.append(CallArguments(call["function"]["arguments"]))
        return [piece for piece in pieces if isinstance(piece, CallStart) or piece.text]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Join neighbouring pieces of the same type."""
    joined: list[Piece] = []
    for kind, neighbours in groupby(pieces, type):
        if kind is CallStart:
            joined += neighbours
        else:
            joined.append(kind("".join(map(_delta_text, neighbours))))
    return joined


def piece_len(piece: Piece) -> int:
    """Return the number of characters of a piece; those of a name count."""
    return len(_delta_text(piece))


def _delta_text(piece: Piece) -> str:
    return piece.name if isinstance(piece, CallStart) else piece.text
