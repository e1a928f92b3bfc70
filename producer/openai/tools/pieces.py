"""What a parser of tool calls makes of a model's text, piece by piece."""

from __future__ import annotations

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text that is no tool call."""

    text: str


class CallPiece(msgspec.Struct, frozen=True):
    """A part of the ``index``-th call of the text: the first has its ``name``, each may have more of its arguments.

    The ``arguments`` of all pieces of a call, joined, are the JSON object as the model wrote it.
    """

    index: int
    name: str | None
    arguments: str


Piece = Content | CallPiece


def joined(pieces: list[Piece]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content and the calls, as pairs of name and arguments, that ``pieces`` are together."""
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
