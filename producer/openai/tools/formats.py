"""The formats in which models write tool calls: the start of a section of calls, its grammar, and parsers by name.

A grammar starts with the first character after the marker (or with the first of the text), and returns at the end of
the section. Text that it has not settled by then is content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from ....shared.errors import ValidationError
from ....shared.values.shown import shown
from .call_reader import CallReader
from .json_reader import MalformedError, Reader, read_literally, skip_whitespace

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
_MISTRAL_CALL_ID, _MISTRAL_ARGUMENTS = "[CALL_ID]", "[ARGS]"
_MAX_NAME_CHARS = 256

Grammar = Callable[[CallReader, str], Reader[None]]

HERMES_PARSER = "hermes"
DEFAULT_TOOL_CALL_PARSER = HERMES_PARSER


@dataclass(frozen=True)
class CallFormat:
    """Format in which a family of models writes calls.

    Args:
        read_section: the grammar.
        marker: starts a section anywhere in the text; may be a special token of the vocabulary.
        first_chars: if the text starts with one of these, whitespace aside, it starts with a section without a marker.
        names_must_match: an object that names no tool of the request is content. For formats without a marker, because
            a JSON answer looks like a call.
    """

    read_section: Grammar
    marker: str | None = None
    first_chars: str = ""
    names_must_match: bool = False


def _read_hermes(reader: CallReader, char: str) -> Reader[None]:
    """Read an object and the end marker, which some models omit and the end of the text may truncate."""
    char = yield from skip_whitespace(char)
    char = yield from reader.read_call(char)
    char = yield from skip_whitespace(char)
    for expected in HERMES_END:
        if not char or char == expected == ">":
            reader.settle()
        if char != expected or char == ">":
            return
        char = yield


def _read_llama3(reader: CallReader, char: str) -> Reader[None]:
    """Read objects separated by semicolons."""
    while True:
        char = yield from skip_whitespace(char)
        char = yield from reader.read_call(char)
        char = yield from skip_whitespace(char)
        if char == ";":
            char = yield
        elif char != "{":
            return


def _read_mistral(reader: CallReader, char: str) -> Reader[None]:
    """Read a list of objects or, since version 11 of the tokenizer, ``name[ARGS]{...}``."""
    char = yield from skip_whitespace(char)
    if char == "[":
        yield from _read_list(reader, char)
    elif char == "{":
        yield from reader.read_call(char)
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


def _read_list(reader: CallReader, char: str) -> Reader[None]:
    """Read a JSON list of objects."""
    char = yield from read_literally("[", char)
    char = yield from skip_whitespace(char)
    if char == "]":
        raise MalformedError  # no call: the text is the answer
    while True:
        char = yield from reader.read_call(char)
        char = yield from skip_whitespace(char)
        if char == "]":
            reader.settle()
            return
        char = yield from read_literally(",", char)
        char = yield from skip_whitespace(char)


def named_call(name: str) -> CallFormat:
    """Return the format of an answer that consists only of the arguments of ``name``."""

    def read(reader: CallReader, char: str) -> Reader[None]:
        yield from reader.read_arguments_of(name, char)

    return CallFormat(read, first_chars="{")


HERMES = CallFormat(_read_hermes, marker=HERMES_BEGIN)
LLAMA3_JSON = CallFormat(_read_llama3, marker="<|python_tag|>", first_chars="{", names_must_match=True)
MISTRAL = CallFormat(_read_mistral, marker="[TOOL_CALLS]")
LIST_OF_CALLS = CallFormat(_read_list, first_chars="[")


@dataclass(frozen=True)
class ToolCallStyle:
    """Style in which a family of models calls tools.

    Args:
        num_id_chars: length of a call's id after ``id_prefix``. Mistral's templates accept only ids of nine characters.
    """

    call_format: CallFormat
    id_prefix: str = "call_"
    num_id_chars: int = 24

    def call_id(self, request_id: str, choice: int, index: int) -> str:
        """Return the id of a call. It is the same whenever the same answer is parsed, so that a stream can be read
        again."""
        digest = hashlib.sha256(f"{request_id}/{choice}/{index}".encode()).hexdigest()
        return self.id_prefix + digest[: self.num_id_chars]


TOOL_CALL_PARSERS: dict[str, ToolCallStyle] = {
    HERMES_PARSER: ToolCallStyle(HERMES),
    "llama3_json": ToolCallStyle(LLAMA3_JSON),
    "mistral": ToolCallStyle(MISTRAL, id_prefix="", num_id_chars=9),
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
