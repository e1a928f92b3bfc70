"""Readers of numeric options: numbers within bounds, ranges, seconds, shares, bytes."""

from __future__ import annotations

import re
from typing import Any

from .readers import Reader, RefusedValueError

_MAX_SIZE_CHARS = 40
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)


class Number(Reader):
    """A number within bounds.

    Args:
        why: the reason for the bounds, or the meaning of a bound.
    """

    metavar, kind = "X", "number"

    def __init__(self, least: float, most: float, why: str = "", metavar: str = "") -> None:
        super().__init__(metavar)
        self.least, self.most, self.why = least, most, why
        self.kind = f"{self.kind}, {least:,} to {most:,}"

    def read(self, text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise RefusedValueError("must be a number") from None

    def read_toml(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RefusedValueError("must be a number, without quotes")
        # Check before the conversion, because a large integer may exceed the range of floats.
        self.check(value)
        return float(value)

    def check(self, value: float) -> None:
        # In this form NaN is refused too, because every comparison with it is false.
        if not self.least <= value <= self.most:
            bound = f"at most {self.most:,}" if value > self.most else f"at least {self.least:,}"
            raise RefusedValueError(f"must be {bound}", self.why)


class Seconds(Number):
    """A time in seconds."""

    metavar, kind = "S", "seconds"

    def __init__(self, least: float, why: str = "") -> None:
        # No deployment needs more.
        super().__init__(least, 10**9, why)
        self.kind = f"seconds, at least {least:,}"


class Share(Number):
    """A share above 0, at most ``most``."""

    def __init__(self, most: float = 1) -> None:
        super().__init__(0, most, metavar="SHARE")
        self.kind = f"share, above 0 to {most:g}"

    def check(self, value: float) -> None:
        if not 0 < value <= self.most:
            raise RefusedValueError(f"must be in (0, {self.most:g}]")


class Integer(Number):
    """A whole number within bounds."""

    metavar, kind = "N", "whole number"

    def read(self, text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise RefusedValueError("must be a whole number") from None

    def read_toml(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise RefusedValueError("must be a whole number, without quotes")
        return value


class Size(Integer):
    """A number of bytes: "2GiB", "512M" (binary, as usual for memory), "1.5GB" (decimal), or a plain number."""

    metavar, kind = "2GiB", "size"

    def __init__(self, least: int, most: int) -> None:
        super().__init__(least, most, "in bytes")
        self.kind = "size such as `2GiB`"

    def read(self, text: str) -> int:
        match = _BYTES.fullmatch(text.strip())
        if not match or len(text) > _MAX_SIZE_CHARS:
            raise RefusedValueError("must be a size such as 2GiB or 512MiB")
        number, prefix, binary = match[1], (match[2] or "").lower(), match[3]
        decimal = bool(prefix) and not binary and text.strip().lower().endswith("b")
        return int(float(number) * (1000 if decimal else 1024) ** " kmgt".index(prefix or " "))

    def read_toml(self, value: Any) -> int:
        if isinstance(value, str):
            return self.read(value)
        try:
            return super().read_toml(value)
        except RefusedValueError:
            raise RefusedValueError('must be a size such as "2GiB", or a number of bytes') from None


class IntegerOrRange(Reader):
    """A whole number within bounds, or "MIN:MAX", where MIN may be 0; the value of a range is its text."""

    metavar = "N|MIN:MAX"

    def __init__(self, least: int, most: int) -> None:
        super().__init__()
        self._one = Integer(least, most)
        self.kind = f"{self._one.kind}, or two such as `1:8`"

    def read(self, text: str) -> int | str:
        if ":" not in text:
            return self._one.read(text)
        least, most = bounds(text)
        return f"{least}:{most}"

    def read_toml(self, value: Any) -> int | str:
        return self.read(value) if isinstance(value, str) and ":" in value else self._one.read_toml(value)

    def check(self, value: int | str) -> None:
        least, most = bounds(value)
        self._one.check(most)
        if least > most:
            raise RefusedValueError(f"must be MIN:MAX, and {least} is more than {most}")


def bounds(value: int | str) -> tuple[int, int]:
    """Return the least and the most number of ``value``; both are equal for a number.

    Raises:
        RefusedValueError: ``value`` is not a range.
    """
    if isinstance(value, int):
        return value, value
    least, _, most = value.partition(":")
    try:
        # Only digits, although int also accepts signs, spaces and underscores.
        if not (least.isdecimal() and most.isdecimal()):
            raise ValueError
        return int(least), int(most)
    except ValueError:
        raise RefusedValueError("must be a whole number, or MIN:MAX such as 1:8") from None
