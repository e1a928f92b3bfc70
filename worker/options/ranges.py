"""A number, or the least and the most of one."""

from __future__ import annotations

from typing import Any

from .numbers import Integer
from .readers import Reader, RefusedValueError


class IntegerOrRange(Reader):
    """A whole number within bounds, or "LEAST:MOST", whose least may be 0; a range stays text."""

    metavar = "N|LEAST:MOST"

    def __init__(self, least: int, most: int) -> None:
        super().__init__()
        self._one = Integer(least, most)
        self.kind = f"{self._one.kind}, or two such as `1:8`"

    def read(self, text: str) -> int | str:
        if ":" not in text:
            return self._one.read(text)
        least, most = bounds(text)
        return f"{least}:{most}"

    def take(self, value: Any) -> int | str:
        return self.read(value) if isinstance(value, str) and ":" in value else self._one.take(value)

    def check(self, value: int | str) -> None:
        least, most = bounds(value)
        self._one.check(most)
        if least > most:
            raise RefusedValueError(f"must be LEAST:MOST, and {least} is more than {most}")


def bounds(value: int | str) -> tuple[int, int]:
    """Return the least and the most; of a number both are that.

    Raises:
        RefusedValueError: it is no range.
    """
    if isinstance(value, int):
        return value, value
    least, _, most = value.partition(":")
    try:
        # What int would take beside digits, signs and spaces, nobody means here.
        if not (least.isdecimal() and most.isdecimal()):
            raise ValueError
        return int(least), int(most)
    except ValueError:
        raise RefusedValueError("must be a whole number, or LEAST:MOST such as 1:8") from None
