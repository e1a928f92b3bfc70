"""Read arguments in the forms that are not JSON, and write them as a JSON object.

Readers are generators of characters as in ``json_reader``. Strings are written as they arrive; a value of another type
is written when it is complete, since its type follows from the schema and its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....shared.params.answer_formats import BareKeyArguments, ElementArguments, TreeArguments
from .call_reader import CallReader
from .json_reader import MAX_NESTING, MalformedError, Reader, read_literally, read_one_of, read_until, skip_whitespace
from .values import Schemas, escaped, json_string

_MAX_KEY_CHARS = 256
_BARE_ENDS = ",]}"


def read_elements(
    reader: CallReader, form: ElementArguments, schema: Mapping[str, Any], call_end: str, char: str
) -> Reader[str]:
    """Read one element per parameter. Returns the character after ``call_end``."""
    schemas, keys = Schemas(schema), set[str]()
    reader.write("{")
    while True:
        char = yield from skip_whitespace(char)
        literal, char = yield from read_one_of((form.key[0], call_end), char)
        if literal == call_end:
            reader.write("}")
            return char
        key, char = yield from _read_key(form.key[1], char)
        if key in keys:
            raise MalformedError
        reader.write(f"{', ' if keys else ''}{json_string(key)}: ")
        keys.add(key)
        part = schemas.of_property(schema, key)
        if form.kind is not None:
            char = yield from read_literally(form.kind[0], char)
            kind, char = yield from _read_key(form.kind[1], char)
            if kind != form.string_kind:
                part = {}
            elif not schemas.types(part):
                part = {"type": "string"}
        if form.value[0]:
            char = yield from skip_whitespace(char)
            char = yield from read_literally(form.value[0], char)
        if form.has_line_breaks and char == "\n":
            char = yield
        char = yield from _read_unquoted(
            reader, schemas, part, form.value[1], char, drops_line_break=form.has_line_breaks
        )


def _read_unquoted(
    reader: CallReader,
    schemas: Schemas,
    schema: Mapping[str, Any],
    close: str,
    char: str,
    *,
    drops_line_break: bool = False,
) -> Reader[str]:
    """Read a value up to ``close``, and write it as JSON. For ``drops_line_break`` see ``read_until``."""
    if schemas.is_free_text(schema):
        return (yield from _read_text(reader, close, char, drops_line_break=drops_line_break))
    parts: list[str] = []
    char = yield from read_until(close, char, parts.append, drops_line_break=drops_line_break)
    reader.write(schemas.json_of("".join(parts), schema))
    return char


def _read_text(reader: CallReader, close: str, char: str, *, drops_line_break: bool = False) -> Reader[str]:
    """Read text up to ``close``, and write it as a JSON string as it arrives."""
    reader.write('"')
    char = yield from read_until(
        close, char, lambda text: reader.write(escaped(text)), drops_line_break=drops_line_break
    )
    reader.write('"')
    return char


def _read_key(close: str, char: str) -> Reader[tuple[str, str]]:
    """Read a name up to ``close``."""
    parts: list[str] = []

    def add(text: str) -> None:
        parts.append(text)
        if not text.isprintable() or sum(map(len, parts)) > _MAX_KEY_CHARS:
            raise MalformedError

    char = yield from read_until(close, char, add)
    key = "".join(parts)
    if not key:
        raise MalformedError
    return key, char


def read_tree(
    reader: CallReader, form: TreeArguments, schema: Mapping[str, Any], call_end: str, char: str
) -> Reader[str]:
    """Read elements that are named like the parameters. Returns the character after ``call_end``."""
    char = yield from skip_whitespace(char)
    char = yield from read_literally(form.prefix, char)
    tree = _Tree(reader, form.prefix, Schemas(schema))
    return (yield from tree.read_object(schema, call_end.removeprefix(form.prefix), char, 0))


class _Tree:
    """Reader of nested elements, which starts after the prefix of a tag."""

    def __init__(self, reader: CallReader, prefix: str, schemas: Schemas) -> None:
        self._reader = reader
        self._prefix = prefix
        self._schemas = schemas

    def read_object(self, schema: Mapping[str, Any], close: str, char: str, nesting: int) -> Reader[str]:
        """Read the properties of an object up to the tag ``close``."""
        keys: set[str] = set()
        self._reader.write("{")
        while True:
            tag, char = yield from self._read_tag(char)
            if tag == close:
                self._reader.write("}")
                return char
            if tag in keys or tag.startswith("</"):
                raise MalformedError
            self._reader.write(f"{', ' if keys else ''}{json_string(tag[1:-1])}: ")
            keys.add(tag)
            part = self._schemas.of_property(schema, tag[1:-1])
            char = yield from self._read_value(part, tag, char, nesting)
            char = yield from self._read_prefix(char)

    def _read_value(self, schema: Mapping[str, Any], tag: str, char: str, nesting: int) -> Reader[str]:
        """Read the value of an element up to its end tag."""
        types = self._schemas.types(schema)
        if "object" not in types and "array" not in types:
            close = f"{self._prefix}</{tag[1:]}"
            return (yield from _read_unquoted(self._reader, self._schemas, schema, close, char))
        if nesting == MAX_NESTING:
            raise MalformedError
        char = yield from self._read_prefix(char)
        close = f"</{tag[1:]}"
        if "array" in types and "object" not in types:
            return (yield from self._read_array(schema, close, char, nesting + 1))
        return (yield from self.read_object(schema, close, char, nesting + 1))

    def _read_array(self, schema: Mapping[str, Any], close: str, char: str, nesting: int) -> Reader[str]:
        separator = ""
        self._reader.write("[")
        while True:
            tag, char = yield from self._read_tag(char)
            if tag == close:
                self._reader.write("]")
                return char
            if tag != "<item>":
                raise MalformedError
            self._reader.write(separator)
            separator = ", "
            char = yield from self._read_value(self._schemas.of_items(schema), tag, char, nesting)
            char = yield from self._read_prefix(char)

    def _read_prefix(self, char: str) -> Reader[str]:
        char = yield from skip_whitespace(char)
        return (yield from read_literally(self._prefix, char))

    def _read_tag(self, char: str) -> Reader[tuple[str, str]]:
        if char != "<":
            raise MalformedError
        name, char = yield from _read_key(">", (yield))
        return f"<{name}>", char


def read_bare_keys(reader: CallReader, form: BareKeyArguments, char: str) -> Reader[str]:
    """Read an object whose keys have no quotes. Returns the character after it."""
    if char != "{":
        raise MalformedError
    return (yield from _read_container(reader, form.quote, char, 0))


def _read_bare(reader: CallReader, quote: str, char: str, nesting: int) -> Reader[str]:
    """Read a value, and write it as JSON."""
    if nesting == MAX_NESTING:
        raise MalformedError
    if char in ("{", "["):
        return (yield from _read_container(reader, quote, char, nesting))
    if char == quote[0]:
        char = yield from read_literally(quote, char)
        return (yield from _read_text(reader, quote, char))
    text = ""
    while char and char not in _BARE_ENDS:
        text += char
        char = yield
    if not char or not text.strip():
        raise MalformedError
    reader.write(Schemas({}).json_of(text.strip(), {}))
    return char


def _read_container(reader: CallReader, quote: str, char: str, nesting: int) -> Reader[str]:
    is_object, close = char == "{", "}" if char == "{" else "]"
    reader.write(char)
    char = yield from skip_whitespace((yield))
    keys: set[str] = set()
    while char != close:
        if is_object:
            key, char = yield from _read_bare_key(quote, char)
            if key in keys:
                raise MalformedError
            keys.add(key)
            reader.write(f"{json_string(key)}: ")
        char = yield from _read_bare(reader, quote, char, nesting + 1)
        char = yield from skip_whitespace(char)
        if char == ",":
            char = yield from skip_whitespace((yield))
            if char == close:
                raise MalformedError
            reader.write(", ")
        elif char != close:
            raise MalformedError
    reader.write(close)
    return (yield)


def _read_bare_key(quote: str, char: str) -> Reader[tuple[str, str]]:
    if char == quote[0]:
        char = yield from read_literally(quote, char)
        key, char = yield from _read_key(quote, char)
        char = yield from skip_whitespace(char)
        char = yield from read_literally(":", char)
    else:
        key, char = yield from _read_key(":", char)
    return key.strip(), (yield from skip_whitespace(char))
