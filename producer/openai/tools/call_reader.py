"""Collect the calls of one section of a text, as a format's grammar reads them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from .json_reader import MalformedError, Reader, read_key, read_string, read_value, skip_whitespace


class Content(msgspec.Struct, frozen=True):
    """Text outside of tool calls."""

    text: str


class CallPiece(msgspec.Struct, frozen=True):
    """A part of the ``index``-th call of the text. The first part has the ``name``; each may add to the arguments.

    The concatenated ``arguments`` of all parts are a JSON object, as the model wrote it if its format is JSON. With the
    name comes ``call_id`` if the model wrote one.
    """

    index: int
    name: str | None
    arguments: str
    call_id: str | None = None


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


class CallReader:
    """Reads calls from ``text``, of which the character at ``position`` was sent last.

    Grammars (``formats``) are generators that use it. Pieces of a call are emitted as they are read. With ``whole``
    they are emitted when the call is complete, so a malformed call emits nothing.

    Args:
        schemas: JSON schemas of the functions' arguments, by name.
        names_must_match: whether a call of another function is not a call.
    """

    def __init__(
        self, *, whole: bool, schemas: Mapping[str, Mapping[str, Any]], names_must_match: bool = False
    ) -> None:
        self._whole = whole
        self._schemas = schemas
        self._names_must_match = names_must_match
        self._num_calls = 0
        self._call_ids: set[str] = set()
        self.pieces: list[CallPiece] = []
        self.start_section("", 0)

    @property
    def num_calls(self) -> int:
        """Number of calls emitted."""
        return self._num_calls

    def start_section(self, text: str, first: int) -> None:
        """Start a section: ``text`` contains its calls, and its grammar starts at ``first``."""
        self.text = text
        self.position = first
        self.settled = 0  # everything before this belongs to emitted calls
        self._forget_call()

    def schema_of(self, name: str) -> Mapping[str, Any]:
        """Return the schema of the arguments of ``name``; empty if it is unknown."""
        return self._schemas.get(name, {})

    def read_call(self, char: str, names: Collection[str], arguments: Collection[str]) -> Reader[str]:
        """Read an object with a name and arguments under one of these keys. Other keys are ignored.

        Without ``names`` the key of the arguments is the name.
        """
        if char != "{":
            raise MalformedError
        char = yield from skip_whitespace((yield))
        while True:
            key, char = yield from read_key(char)
            if not names:
                self.begin(key)
                char = yield from self._read_arguments(char)
            elif key in names:
                name, char = yield from read_string(char)
                self.begin(name)
            elif key in arguments:
                char = yield from self._read_arguments(char)
            else:
                char = yield from read_value(char, nesting=1)
            char = yield from skip_whitespace(char)
            if char == "}":
                self.complete(end=self.position + 1)
                return (yield)
            if char != ",":
                raise MalformedError
            char = yield from skip_whitespace((yield))

    def read_arguments_of(self, name: str, char: str) -> Reader[str]:
        """Read a call of ``name`` that consists of its arguments alone, a JSON object."""
        self.begin(name)
        char = yield from self.read_arguments(char)
        self.complete(end=self.position)
        return char

    def read_arguments(self, char: str) -> Reader[str]:
        """Read a JSON object, the arguments of the call that was begun. Returns the character after it."""
        if char != "{":
            raise MalformedError
        return (yield from self._read_arguments(char))

    def begin(self, name: str) -> None:
        """Set the name of the call that is being read."""
        is_allowed = not self._names_must_match or name in self._schemas
        if self._name is not None or not name or not name.isprintable() or not is_allowed:
            raise MalformedError
        self._name = name

    def set_id(self, call_id: str) -> None:
        """Set the id that the model wrote for the call. An id that an earlier call has is ignored."""
        if call_id not in self._call_ids:
            self._call_id = call_id
            self._call_ids.add(call_id)

    def write(self, arguments: str) -> None:
        """Add to the arguments of a call in a format that is not JSON."""
        self._written = (self._written or "") + arguments

    def settle(self, end: int) -> None:
        """Count everything before the position ``end`` to the calls."""
        self.settled = end

    def flush(self) -> None:
        """Emit the part read so far, if allowed; the character at ``position`` is included."""
        if not self._whole:
            self._emit(self.position + 1)

    def break_off(self, *, keep: bool) -> None:
        """Abandon the call, because the character at ``position`` is invalid or the text ended. Emitted parts remain a
        call.

        Args:
            keep: whether a call whose arguments have started is emitted even with ``whole``.
        """
        if keep or not self._whole:
            self._emit(self.position)
        if self._is_emitted:
            self._num_calls += 1
            self.settled = self.position if self._arguments_end is None else self._arguments_end
        self._forget_call()

    def _forget_call(self) -> None:
        self._name: str | None = None
        self._is_emitted = False
        self._has_arguments = False
        self._arguments_start: int | None = None
        self._arguments_end: int | None = None
        self._string_arguments = "{}"
        self._written: str | None = None
        self._call_id: str | None = None
        self._num_emitted = 0

    def _read_arguments(self, char: str) -> Reader[str]:
        if self._has_arguments:
            raise MalformedError
        self._has_arguments = True
        if char == "{":
            self._arguments_start = self.position
            char = yield from read_value(char, nesting=1)
            self._arguments_end = self.position
        elif char == '"':  # some models write the object as a string
            text, char = yield from read_string(char)
            _check_object(text)
            self._string_arguments = text
        elif char == "n":
            char = yield from read_value(char)
        else:
            raise MalformedError
        return char

    def complete(self, end: int) -> None:
        """End the call, which was read up to the position ``end``, exclusive."""
        if self._name is None:
            raise MalformedError
        if self._arguments_start is None and self._written is None:
            self._written = self._string_arguments
        self._emit(end)
        self._num_calls += 1
        self.settled = end
        self._forget_call()

    def _emit(self, end: int) -> None:
        """Emit name and arguments up to ``end``, if both have been read."""
        if self._name is None:
            return
        if self._written is not None:
            arguments = self._written[self._num_emitted :]
        elif self._arguments_start is not None:
            start = self._arguments_start + self._num_emitted
            arguments = self.text[start : end if self._arguments_end is None else self._arguments_end]
        else:
            return
        if self._is_emitted:
            if arguments:
                self.pieces.append(CallPiece(self._num_calls, None, arguments))
        else:
            self.pieces.append(CallPiece(self._num_calls, self._name, arguments, self._call_id))
        self._is_emitted = True
        self._num_emitted += len(arguments)


def _check_object(text: str) -> None:
    try:
        value = json.loads(text)
        text.encode()
    except (ValueError, RecursionError):
        raise MalformedError from None
    if not isinstance(value, dict):
        raise MalformedError
