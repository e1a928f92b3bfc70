"""Numbers and fields as people read them."""

from __future__ import annotations

import time
from collections.abc import Mapping

# Size in seconds, name, and how many of it are said in the next unit: "90 s" says more than "2 min".
_UNITS = ((1, "s", 120), (60, "min", 120), (3600, "h", 48))


def format_duration(seconds: float | None) -> str:
    """Return a length of time in the unit that suits it, "0.4 s" or "3 min"; "-" if it is not known."""
    if seconds is None:
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for size, unit, most in _UNITS:
        if round(seconds / size) < most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def format_time(at: float) -> str:
    """Return a Unix time as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def format_sheet(fields: Mapping[str, str]) -> str:
    """Return one line for each field, the values aligned."""
    return "\n".join(f"{name + ':':<12}{value}" for name, value in fields.items())
