"""Checks of single values that callers pass: text and data that can be sent, timeouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import ValidationError
from .shown import cut, shown

_encode_json = msgspec.json.Encoder().encode
_encode_msgpack = msgspec.msgpack.Encoder().encode
# Errors of msgspec: for types, numbers, text (a UnicodeEncodeError), and unlimited nesting.
UNENCODABLE = (TypeError, OverflowError, ValueError, RecursionError)
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


def check_timeout(field: str, value: object) -> None:
    """Raise ``ValidationError`` unless ``value`` is a number of seconds of at most a day."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_TIMEOUT_S:
        raise ValidationError(
            f"{field} must be a number of seconds above 0, at most {MAX_TIMEOUT_S:g}, got {shown(value)}"
        )
