"""Formatting of numbers and times, and escaping of text that could deceive its reader."""

from __future__ import annotations

import math
import time

from ...shared.queue.budgets import Unit
from ...shared.values.shown import format_bytes
from ..words import format_duration, state_words

__all__ = [
    "ago",
    "amount",
    "as_unit",
    "cost",
    "duration",
    "length_of_time",
    "moment",
    "number",
    "percent",
    "plain",
    "size",
    "state_words",
]
# Characters that are invisible or change the direction of the text around them.
_UNSEEN = {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)}
_UNSEEN |= {code: f"\\x{code:02x}" for code in (*range(9), 11, 12, *range(14, 32), *range(127, 160))}
# Halves of characters, which no output can encode.
_UNSEEN |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}
# Not thin spaces alone: lines never break at it.
_THOUSANDS = "\u202f"
# Times that the calendar has.
_LATEST = 253_402_300_799


def duration(seconds: float | None) -> str:
    """Return a duration; a dash if it is unknown or 0."""
    return "-" if not seconds else "until one ends" if seconds == math.inf else format_duration(seconds)


def length_of_time(seconds: float) -> str:
    """Return a duration with milliseconds, for times within one request."""
    if not 0 <= seconds < 1:
        return format_duration(seconds)
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 or not seconds else f"{1000 * seconds:.1f} ms"


def as_unit(value: float | None, unit: str) -> str:
    """Return a value of a chart in the format of its unit; a dash if it is unknown."""
    return "-" if value is None else {"number": number, "length_of_time": length_of_time}[unit](value)


def moment(at: float | None) -> str:
    """Return a Unix time in UTC; a dash for None, 0 and times that no calendar has."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) if at and 0 < at <= _LATEST else "-"


def ago(at: float | None, now: float) -> str:
    """Return a Unix time relative to ``now``: "12 s ago" or "in 3 min"; a dash if it is unknown."""
    if moment(at) == "-" or at is None:
        return "-"
    seconds = round(now - at)
    size = f"{abs(seconds)} s" if abs(seconds) < 10 else format_duration(abs(seconds))
    return f"{size} ago" if seconds >= 0 else f"in {size}"


def number(value: float | None) -> str:
    """Return a count with separated thousands, or a decimal with two decimals or digits; a dash for None."""
    if value is None or not math.isfinite(value):
        return "-"
    if isinstance(value, int) or value >= 100 or value == int(value):
        return f"{value:,.0f}".replace(",", _THOUSANDS)
    return f"{value:.1f}" if value >= 1 else _with_digits(value, 2)


def cost(value: float) -> str:
    """Return an amount of money, with the decimals that a few requests need."""
    return _with_digits(value, 4).replace(",", _THOUSANDS)


def amount(value: float, unit: str) -> str:
    """Return an amount of a budget."""
    return number(value) if unit == Unit.TOKENS else cost(value)


def _with_digits(value: float, num_decimals: int) -> str:
    """Return a number with ``num_decimals``, or with two digits if it is so small that these would hide it."""
    if 0 < abs(value) < 10.0**-num_decimals:
        num_decimals = 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{num_decimals}f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def size(num_bytes: float | None) -> str:
    return "-" if not num_bytes else format_bytes(num_bytes)


def plain(text: object) -> str:
    """Return text with invisible and direction-changing characters escaped."""
    return str(text).translate(_UNSEEN)
