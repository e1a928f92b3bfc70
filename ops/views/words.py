"""Formatting of numbers and times, and escaping of text that could deceive its reader."""

from __future__ import annotations

import time

from ...shared.values.shown import format_bytes
from ..words import format_duration

# Characters that are invisible or change the direction of the text around them.
_UNSEEN = {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)}
_UNSEEN |= {code: f"\\x{code:02x}" for code in (*range(9), 11, 12, *range(14, 32), *range(127, 160))}


def duration(seconds: float | None) -> str:
    """Return a duration; a dash if it is unknown or 0."""
    return "-" if not seconds else "until one ends" if seconds == float("inf") else format_duration(seconds)


def length_of_time(seconds: float) -> str:
    """Return a duration with milliseconds, for times within one request."""
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else format_duration(seconds)


def as_unit(value: float | None, unit: str) -> str:
    """Return a value of a chart in the format of its unit; a dash if it is unknown."""
    return "-" if value is None else {"number": number, "length_of_time": length_of_time}[unit](value)


def moment(at: float | None) -> str:
    """Return a Unix time in UTC; a dash for None or 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) if at else "-"


def number(value: float | None) -> str:
    """Return a count with separated thousands, or a decimal with at most two decimals; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, int) or value >= 100 or value == int(value):
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def size(num_bytes: float | None) -> str:
    return "-" if not num_bytes else format_bytes(num_bytes)


def plain(text: object) -> str:
    """Return text with invisible and direction-changing characters escaped."""
    return str(text).translate(_UNSEEN)
