"""Figures as people read them, and text that cannot trick its reader."""

from __future__ import annotations

import time

from ...shared.process.command_line import format_bytes
from ..words import format_duration

# Characters that change the direction of what stands beside them, or cannot be seen.
_UNSEEN = {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)}
_UNSEEN |= {code: f"\\x{code:02x}" for code in (*range(9), 11, 12, *range(14, 32), *range(127, 160))}


def duration(seconds: float | None) -> str:
    """A length of time; a dash if it is not known or none."""
    return "-" if not seconds else "until one ends" if seconds == float("inf") else format_duration(seconds)


def length_of_time(seconds: float) -> str:
    """A length of time of which thousandths say something, as those of one request's moves."""
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else format_duration(seconds)


def as_unit(value: float | None, unit: str) -> str:
    """A figure of a chart by the filter of its unit; a dash if it is not known."""
    return "-" if value is None else {"number": number, "length_of_time": length_of_time}[unit](value)


def moment(at: float | None) -> str:
    """A Unix time in UTC; a dash for none."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) if at else "-"


def number(value: float | None) -> str:
    """A count with thousands apart, or a figure with as many digits as say something."""
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
    """Text with what cannot be seen, or turns the direction of its line, written out."""
    return str(text).translate(_UNSEEN)
