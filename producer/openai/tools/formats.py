"""Grammars of the formats in which models write tool calls, made from the records in ``shared/params/answer_formats``.

A grammar starts with the first character of a marker (or of the text), and returns after the calls. Text that it has
not settled by then is content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ....shared.errors import ValidationError
from ....shared.params.answer_formats import (
    HERMES,
    TOOL_CALL_FORMATS,
    BareKeyArguments,
    ChannelCalls,
    ElementArguments,
    FramedCalls,
    MistralCalls,
    ObjectCalls,
    PythonCalls,
    ToolCallFormat,
    TreeArguments,
)
from ....shared.values.shown import shown
from .arguments import read_bare_keys, read_elements, read_tree
from .call_reader import CallReader
from .json_reader import MalformedError, Reader, read_literally, read_one_of, skip_whitespace
from .python_reader import read_python_call

DEFAULT_TOOL_CALL_PARSER = HERMES
_MISTRAL_CALL_ID, _MISTRAL_ARGUMENTS = "[CALL_ID]", "[ARGS]"
_USUAL = ObjectCalls()
_MAX_NAME_CHARS = 256
_MAX_COUNTER_DIGITS = 9

Grammar = Callable[[CallReader, str], Reader[None]]


@dataclass(frozen=True)
class CallFormat:
    """Reader of the calls of a text.

    Args:
        read_section: the grammar.
        markers: each starts a section anywhere in the text; may be a special token of the vocabulary.
        first_chars: if the text starts with one of these, whitespace aside, it starts with a section without a marker.
        names_must_match: a call that names no tool of the request is content. For formats without a marker, because
            a JSON answer looks like a call.
    """

    read_section: Grammar
    markers: tuple[str, ...] = ()
    first_chars: str = ""
    names_must_match: bool = False


def _stripped(literals: Iterable[str]) -> tuple[str, ...]:
    """Return literals without the whitespace around them, which is optional when a call is read."""
    return tuple(literal.strip() for literal in literals)


def _read_next(reader: CallReader, literals: Sequence[str], char: str) -> Reader[tuple[str, str]]:
    """Read whitespace and one of ``literals``. Returns it and the next character.

    The literal is empty if something else follows; then the grammar must return. One that the end of the text truncates
    is settled.
    """
    char = yield from skip_whitespace(char)
    if not char or not literals:
        return "", char
    start = reader.position
    try:
        return (yield from read_one_of(literals, char))
    except MalformedError:
        if start < reader.position == len(reader.text):
            reader.settle(reader.position)
        return "", ""


def _read_close(reader: CallReader, close: str, char: str) -> Reader[None]:
    """Read the literal after the calls, which models may omit."""
    literal, _ = yield from _read_next(reader, [close] if close else [], char)
    if literal:
        reader.settle(reader.position)


class _Framed:
    """Grammar of calls between literals."""

    def __init__(self, calls: FramedCalls) -> None:
        self._calls = calls
        self._sections = _stripped(begin for begin, _ in calls.sections)
        self._section_ends = _stripped(end for _, end in calls.sections)
        self._begins = _stripped(calls.call.strip().splitlines())
        self._call_ends = _stripped(calls.call_end.strip().splitlines())

    @property
    def markers(self) -> tuple[str, ...]:
        return self._sections or self._begins

    def read(self, reader: CallReader, char: str) -> Reader[None]:
        """Read a section of calls, or one call if they have no section."""
        if self._sections:
            _, char = yield from read_one_of(self._sections, char)
            char = yield from skip_whitespace(char)
        following = self._call_ends + (self._section_ends + self._begins if self._sections else ())
        literal, char = yield from read_one_of(self._begins, char)
        while literal in self._begins:
            if literal != self._begins[-1]:
                char = yield from skip_whitespace(char)
                char = yield from read_literally(self._begins[-1], char)
            char = yield from self._read_call(reader, char)
            literal, char = yield from _read_next(reader, following, char)
            while literal in self._call_ends:
                reader.settle(reader.position)
                literal, char = yield from _read_next(reader, following, char)
        if literal:
            reader.settle(reader.position)

    def _read_call(self, reader: CallReader, char: str) -> Reader[str]:
        """Read name and arguments."""
        calls = self._calls
        full_name, char = yield from _read_name(char)
        name = full_name.removeprefix(calls.name_prefix)
        reader.begin(name)
        if calls.counter is not None:
            number, char = yield from _read_counter(calls.counter, char)
            if calls.name_prefix:
                reader.set_id(f"{full_name}{calls.counter[0]}{number}")
        if name_end := calls.name_end.strip():
            char = yield from skip_whitespace(char)
            char = yield from read_literally(name_end, char)
        char = yield from skip_whitespace(char)
        schema, end = reader.schema_of(name), self._call_ends[0]
        match calls.arguments:
            case ElementArguments() as form:
                char = yield from read_elements(reader, form, schema, end, char)
            case TreeArguments() as form:
                char = yield from read_tree(reader, form, schema, end, char)
            case BareKeyArguments() as form:
                char = yield from read_bare_keys(reader, form, char)
            case _:
                char = yield from reader.read_arguments(char)
        reader.complete(end=reader.position)
        return char


def _read_name(char: str) -> Reader[tuple[str, str]]:
    name = ""
    while char and (char.isalnum() or char in "_-./"):
        name += char
        char = yield
        if len(name) > _MAX_NAME_CHARS:
            raise MalformedError
    if not name:
        raise MalformedError
    return name, char


def _read_counter(marks: tuple[str, str], char: str) -> Reader[tuple[str, str]]:
    char = yield from read_literally(marks[0], char)
    digits = ""
    while char and char in "0123456789" and len(digits) < _MAX_COUNTER_DIGITS:
        digits += char
        char = yield
    if not digits:
        raise MalformedError
    if marks[1]:
        char = yield from read_literally(marks[1], char)
    return digits, char


def _read_open(opens: Sequence[str], bare: str, char: str) -> Reader[str]:
    """Read the literal before the calls, which ``bare`` makes optional. Returns the first character of the calls."""
    if not bare or char != bare:
        _, char = yield from read_one_of(opens, char)
    return (yield from skip_whitespace(char))


def _read_objects(calls: ObjectCalls) -> Grammar:
    """Return the grammar of a list of objects, or of one object and those that separators add to it."""
    opens, close = _stripped(calls.opens), calls.close.strip()

    def read(reader: CallReader, char: str) -> Reader[None]:
        char = yield from _read_open(opens, calls.bare, char)
        if char == "[":
            char = yield from _read_list(reader, char, calls)
        else:
            char = yield from _read_call(reader, char, calls)
            while calls.separator:
                char = yield from skip_whitespace(char)
                if char == calls.separator:
                    char = yield from skip_whitespace((yield))
                elif char != "{":
                    return
                char = yield from _read_call(reader, char, calls)
        yield from _read_close(reader, close, char)

    return read


def _read_call(reader: CallReader, char: str, calls: ObjectCalls = _USUAL) -> Reader[str]:
    return reader.read_call(char, calls.names, calls.arguments)


def _read_list(reader: CallReader, char: str, calls: ObjectCalls = _USUAL) -> Reader[str]:
    """Read a JSON list of objects."""
    char = yield from read_literally("[", char)
    char = yield from skip_whitespace(char)
    if char == "]":
        raise MalformedError  # no call: the text is the answer
    while True:
        char = yield from _read_call(reader, char, calls)
        char = yield from skip_whitespace(char)
        if char == "]":
            reader.settle(reader.position + 1)
            return (yield)
        char = yield from read_literally(",", char)
        char = yield from skip_whitespace(char)


def _read_python(calls: PythonCalls) -> Grammar:
    """Return the grammar of Python's calls."""

    def read(reader: CallReader, char: str) -> Reader[None]:
        char = yield from _read_open(calls.opens, calls.bare, char)
        if char == "[":
            char = yield from skip_whitespace((yield))
            while char != "]":
                char = yield from (_read_call if char == "{" else read_python_call)(reader, char)
                char = yield from skip_whitespace(char)
                if char == ",":
                    char = yield from skip_whitespace((yield))
                elif char != "]":
                    raise MalformedError
            if not reader.settled:
                raise MalformedError  # an empty list is the answer
            reader.settle(reader.position + 1)
            char = yield
        else:
            while char and (char.isalpha() or char == "_"):
                char = yield from read_python_call(reader, char)
                char = yield from skip_whitespace(char)
        yield from _read_close(reader, calls.close, char)

    return read


def _read_mistral(reader: CallReader, char: str) -> Reader[None]:
    """Read a list of objects or, since version 11 of the tokenizer, ``name[ARGS]{...}``."""
    char = yield from read_literally(MistralCalls().opens[0], char)
    char = yield from skip_whitespace(char)
    if char == "[":
        yield from _read_list(reader, char)
    elif char == "{":
        yield from _read_call(reader, char)
    else:
        name, char = yield from _read_mistral_name(char)
        yield from reader.read_arguments_of(name, char)


def _read_mistral_name(char: str) -> Reader[tuple[str, str]]:
    """Return the name and the first character of the arguments."""
    name = ""
    while char not in ("[", "{", ""):
        if len(name) == _MAX_NAME_CHARS or not char.isprintable():
            raise MalformedError
        name += char
        char = yield
    if char == "[":
        char = yield
        if char == "C":
            char = yield from read_literally(_MISTRAL_CALL_ID[1:], char)
            while char != "[":
                if not char.isalnum():
                    raise MalformedError
                char = yield
            char = yield
        char = yield from read_literally(_MISTRAL_ARGUMENTS[1:], char)
        char = yield from skip_whitespace(char)
    return name.strip(), char


def named_call(name: str) -> CallFormat:
    """Return the format of an answer that consists only of the arguments of ``name``."""

    def read(reader: CallReader, char: str) -> Reader[None]:
        yield from reader.read_arguments_of(name, char)

    return CallFormat(read, first_chars="{")


def _read_answer_list(reader: CallReader, char: str) -> Reader[None]:
    yield from _read_list(reader, char)


LIST_OF_CALLS = CallFormat(_read_answer_list, first_chars="[")


@dataclass(frozen=True)
class ToolCallStyle:
    """Style in which a family of models calls tools; ``call_format`` is None if calls are in channels."""

    record: ToolCallFormat
    call_format: CallFormat | None

    def call_id(self, request_id: str, choice: int, index: int) -> str:
        """Return the id of a call without one of the model. It is the same whenever the same answer is parsed, so that
        a stream can be read again."""
        digest = hashlib.sha256(f"{request_id}/{choice}/{index}".encode()).hexdigest()
        return self.record.id_prefix + digest[: self.record.num_id_chars]


def _call_format(record: ToolCallFormat) -> CallFormat | None:
    match record.calls:
        case FramedCalls() as calls:
            framed = _Framed(calls)
            return CallFormat(framed.read, framed.markers)
        case ObjectCalls() as calls:
            return CallFormat(
                _read_objects(calls), _stripped(calls.opens), calls.bare, names_must_match=bool(calls.bare)
            )
        case PythonCalls() as calls:
            return CallFormat(_read_python(calls), calls.opens, calls.bare, names_must_match=bool(calls.bare))
        case MistralCalls() as calls:
            return CallFormat(_read_mistral, calls.opens)
        case ChannelCalls():
            return None


TOOL_CALL_PARSERS: Mapping[str, ToolCallStyle] = {
    name: ToolCallStyle(record, _call_format(record)) for name, record in TOOL_CALL_FORMATS.items()
}


def find_tool_call_style(name: str) -> ToolCallStyle:
    """Return the style of that name.

    Raises:
        ValidationError: the name is unknown.
    """
    if name not in TOOL_CALL_PARSERS:
        names = ", ".join(sorted(TOOL_CALL_PARSERS))
        raise ValidationError(f"tool_call_parser must be one of {names}, got {shown(name)}")
    return TOOL_CALL_PARSERS[name]
