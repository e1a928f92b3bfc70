"""Checks of single values that callers pass: what can be sent, names as parts of Redis keys, timeouts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ..errors import ValidationError
from .shown import cut, shown

_encode_json = msgspec.json.Encoder().encode
_encode_msgpack = msgspec.msgpack.Encoder().encode
# Errors of msgspec: for types, numbers, text (a UnicodeEncodeError), and unlimited nesting.
UNENCODABLE = (TypeError, OverflowError, ValueError, RecursionError)
DEFAULT_NAMESPACE = "penstock"
MAX_NAME_CHARS = 200
# Similarity of names below which a name is not suggested.
_LEAST_LIKENESS = 0.7
MAX_TIMEOUT_S = 86_400.0


def check_text(field: str, value: object) -> str:
    """Return ``value`` if it is a string that UTF-8 can encode.

    Raises:
        ValidationError: it is no string, or holds half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise ValidationError(f"{field} must be a string, got {shown(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValidationError(f"{field} must be {_of_text(error)}") from None
    return value


def check_path(field: str, value: object) -> str:
    """Return ``value`` if a file system can be asked for it.

    Raises:
        ValidationError: it is no string or empty, holds a NUL, or cannot be encoded.
    """
    if not check_text(field, value) or "\0" in str(value):
        raise ValidationError(f"{field} must be a path without NUL characters, and not empty, got {shown(value)}")
    return str(value)


def check_encodable(field: str, value: Any) -> None:
    """See that JSON can say ``value``, and so can the wire.

    Raises:
        ValidationError: it cannot; names the part that is to blame, such as ``tools[0].function.name``.
    """
    try:
        _encode_json(value)
        _encode_msgpack(value)
    except UNENCODABLE as error:
        raise unencodable(field, value, error) from None


def unencodable(field: str, value: Any, error: Exception) -> ValidationError:
    """Return the error that names the part of ``value`` by which it could not be encoded; ``error`` says that of all.

    A struct's fields are named as they are, without ``field``.
    """
    if isinstance(error, RecursionError):
        return ValidationError(f"{field} is nested too deeply, or holds itself")
    place, part, reason = field, value, error
    while (inner := _culprit(place, part)) is not None:
        place, part, reason = inner
    if isinstance(reason, UnicodeEncodeError):
        return ValidationError(f"{place} must be {_of_text(reason)}")
    return ValidationError(f"{place} must be plain data that JSON can say, got {shown(part)}: {cut(str(reason), 200)}")


def _culprit(field: str, value: Any) -> tuple[str, Any, Exception] | None:
    """The first part of ``value`` that cannot be encoded by itself; None if it has no such part."""
    if isinstance(value, msgspec.Struct):
        prefix = f"{field}." if field else ""
        parts = [(f"{prefix}{name}", getattr(value, name)) for name in value.__struct_fields__]
    elif isinstance(value, Mapping):
        parts = [(f"a key of {field}", key) for key in value]
        parts += [(f"{field}.{key}" if _is_plain(key) else f"{field}[{shown(key)}]", value[key]) for key in value]
    elif isinstance(value, list | tuple):
        parts = [(f"{field}[{position}]", item) for position, item in enumerate(value)]
    else:
        return None
    for place, part in parts:
        try:
            _encode_json(part)
            _encode_msgpack(part)
        except UNENCODABLE as error:
            return place, part, error
    return None


def _is_plain(key: object) -> bool:
    return isinstance(key, str) and key.isidentifier() and len(key) <= 64


def _of_text(error: UnicodeEncodeError) -> str:
    return (
        f"text that UTF-8 can encode, got the lone surrogate "
        f"{shown(error.object[error.start])} at position {error.start}; "
        "leave it out, or decode the text's bytes with errors='replace'"
    )


def check_name(field: str, value: object) -> str:
    """Return ``value`` if it can be part of a key.

    Raises:
        ValidationError: it is empty, too long, or holds a brace or a control character.
    """
    if not isinstance(value, str) or not value or len(value) > MAX_NAME_CHARS:
        raise ValidationError(f"{field} must be a string of 1 to {MAX_NAME_CHARS} characters, got {shown(value)}")
    if "{" in value or "}" in value or not value.isprintable():
        raise ValidationError(f"{field} must hold no braces or control characters, got {shown(value)}")
    return value


def partition_name(model: str, partition: int) -> str:
    """Return what keys, shards and moves call a partition; the first is called as the model."""
    return f"{model}#{partition}" if partition else model


def is_partition_name(name: str) -> bool:
    """Whether a partition of some model is called so, and no model may be."""
    return re.fullmatch(r".*#[1-9][0-9]*", name) is not None


def as_literal(text: str) -> str:
    """Return the pattern that matches these characters alone, for SCAN and ACLs."""
    return re.sub(r"([*?\[\]^\\-])", r"\\\1", text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the question for a word that is none of the known ones; empty if it resembles none of them."""
    nearest = difflib.get_close_matches(word, sorted(known), n=1, cutoff=_LEAST_LIKENESS)
    return f"did you mean {nearest[0]}?" if nearest else ""


def check_timeout(field: str, value: object) -> None:
    """Raise ``ValidationError`` unless ``value`` is a number of seconds of at most a day."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_TIMEOUT_S:
        raise ValidationError(
            f"{field} must be a number of seconds above 0, at most {MAX_TIMEOUT_S:g}, got {shown(value)}"
        )
