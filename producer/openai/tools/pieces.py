"""Pieces of a model's text, as the parser of tool calls emits them."""

from __future__ import annotations

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text outside of tool calls."""

    text: str


class CallPiece(msgspec.Struct, frozen=True):
    """A part of the ``index``-th call of the text. The first part has the ``name``; each may add to the arguments.

    The concatenated ``arguments`` of all parts are the JSON object as the model wrote it.
    """

    index: int
    name: str | None
    arguments: str


Piece = Content | CallPiece


def joined(pieces: list[Piece]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content of ``pieces``, and their calls as pairs of name and arguments."""
    content, calls = "", []
    for piece in pieces:
        if isinstance(piece, Content):
            content += piece.text
        elif piece.name is not None:
            calls.append((piece.name, piece.arguments))
        else:
            name, arguments = calls[piece.index]
            calls[piece.index] = (name, arguments + piece.arguments)
    return content, calls
