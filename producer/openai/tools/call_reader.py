"""The calls of one section of a text: what a format's grammar has read of them, and what of that was given out."""

from __future__ import annotations

import json
from collections.abc import Collection

from .json_reader import MalformedError, Reader, read_key, read_string, read_value, skip_whitespace
from .pieces import CallPiece

_ARGUMENTS = ("arguments", "parameters")


class CallReader:
    """Reads calls from ``text``, whose character at ``position`` is the one that was sent last.

    Grammars (``formats``) are generators over it. Pieces of a call are given out as they are read or, with ``whole``,
    once the call is complete, so that one that turns out malformed has left nothing behind.

    Args:
        names: if given, an object with another name is no call.
    """

    def __init__(self, *, whole: bool, names: Collection[str] | None = None) -> None:
        self._whole = whole
        self._names = names
        self._num_calls = 0
        self.pieces: list[CallPiece] = []
        self.begin("", 0)

    @property
    def num_calls(self) -> int:
        """How many calls have been given out."""
        return self._num_calls

    def begin(self, text: str, first: int) -> None:
        """``text`` is a section of calls, whose grammar begins at ``first``."""
        self.text = text
        self.position = first
        self.settled = 0  # before this, all is calls that were given out
        self._forget_call()

    def read_call(self, char: str) -> Reader[str]:
        """Read an object with a name and arguments; other keys are passed over."""
        if char != "{":
            raise MalformedError
        char = yield from skip_whitespace((yield))
        while True:
            key, char = yield from read_key(char)
            if key == "name":
                name, char = yield from read_string(char)
                self._set_name(name)
            elif key in _ARGUMENTS:
                char = yield from self._read_arguments(char)
            else:
                char = yield from read_value(char, nesting=1)
            char = yield from skip_whitespace(char)
            if char == "}":
                self._complete(behind=self.position + 1)
                return (yield)
            if char != ",":
                raise MalformedError
            char = yield from skip_whitespace((yield))

    def read_arguments_of(self, name: str, char: str) -> Reader[str]:
        """Read a call of ``name`` that is its arguments alone."""
        if char != "{":
            raise MalformedError
        self._set_name(name)
        char = yield from self._read_arguments(char)
        self._complete(behind=self.position)
        return char

    def settle(self) -> None:
        """The character at ``position`` closes what the calls stood in."""
        self.settled = self.position + 1

    def flush(self) -> None:
        """Give out what was read so far, if it may be: the character at ``position`` belongs to it."""
        if not self._whole:
            self._give_out(self.position + 1)

    def break_off(self, *, keep: bool) -> None:
        """The character at ``position`` cannot come, or is the end. What was given out of the call stays a call.

        Args:
            keep: whether a call that had come to its arguments is given out even where whole ones are wanted.
        """
        if keep or not self._whole:
            self._give_out(self.position)
        if self._is_announced:
            self._num_calls += 1
            self.settled = self.position if self._arguments_end is None else self._arguments_end
        self._forget_call()

    def _forget_call(self) -> None:
        self._name: str | None = None
        self._is_announced = False
        self._has_arguments = False
        self._arguments_start: int | None = None
        self._arguments_end: int | None = None
        self._decoded_arguments = "{}"
        self._num_given_out = 0

    def _set_name(self, name: str) -> None:
        is_known = self._names is None or name in self._names
        if self._name is not None or not name or not name.isprintable() or not is_known:
            raise MalformedError
        self._name = name

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
            self._decoded_arguments = text
        elif char == "n":
            char = yield from read_value(char)
        else:
            raise MalformedError
        return char

    def _complete(self, behind: int) -> None:
        """The call is read, up to before the position ``behind``."""
        if self._name is None:
            raise MalformedError
        if self._arguments_start is None:
            self.pieces.append(CallPiece(self._num_calls, self._name, self._decoded_arguments))
        else:
            self._give_out(behind)
        self._num_calls += 1
        self.settled = behind
        self._forget_call()

    def _give_out(self, end: int) -> None:
        """Give out name and arguments as far as they stand before ``end``, if there are both."""
        if self._name is None or self._arguments_start is None:
            return
        start = self._arguments_start + self._num_given_out
        arguments = self.text[start : end if self._arguments_end is None else self._arguments_end]
        if arguments or not self._is_announced:
            name = None if self._is_announced else self._name
            self.pieces.append(CallPiece(self._num_calls, name, arguments))
        self._is_announced = True
        self._num_given_out += len(arguments)


def _check_object(text: str) -> None:
    try:
        value = json.loads(text)
        text.encode()
    except (ValueError, RecursionError):
        raise MalformedError from None
    if not isinstance(value, dict):
        raise MalformedError
