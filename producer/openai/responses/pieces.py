"""Pieces of a generation in order of generation: reasoning, text and calls."""

from __future__ import annotations

from typing import Any

import msgspec


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
