"""What a generation consists of, once thoughts and calls are told from the answer; the order is that of generation."""

from __future__ import annotations

from typing import Any

import msgspec


class Thought(msgspec.Struct, frozen=True):
    """More of what the model thinks."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """More of what it says; ``logprobs`` are those of its tokens, if they were asked for."""

    text: str
    logprobs: list[Any] = []


class CallStart(msgspec.Struct, frozen=True):
    """It calls the function ``name``; its arguments follow. ``call_id`` is such as the model's template can take."""

    name: str
    call_id: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the arguments of the call that began last."""

    text: str


Piece = Thought | Content | CallStart | CallArguments
