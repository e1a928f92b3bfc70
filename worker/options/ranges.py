"""Reader of a number or a range."""

from __future__ import annotations

from typing import Any

from .numbers import Integer
from .readers import Reader, RefusedValueError


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
