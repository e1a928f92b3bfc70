"""Numbers and fields as people read them."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from ..shared.errors import ValidationError
from ..shared.queue.request_events import EventKind
from ..shared.values.shown import shown

# Size in seconds, name, and how many of it are said in the next unit: "90 s" says more than "2 min".
_UNITS = ((1, "s", 120), (60, "min", 120), (3600, "h", 48))
_AGE = re.compile(r"(\d{1,9})([smhd])")
_AGE_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# Events whose own names do not say it.
_EVENTS = {
    EventKind.HANDED_BACK: "handed back",
    EventKind.RECLAIMED: "taken back from a dead engine",
    EventKind.CONTINUED: "queued with more input",
    EventKind.AWAITING_INPUT: "awaits input",
}


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


def parse_age(text: str) -> int:
    """Return the seconds of an age such as "15m".

    Raises:
        ValidationError: it is none.
    """
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise ValidationError(f"since must be a number and one of s, m, h, d, such as 15m, got {shown(text)}")
    return int(found[1]) * _AGE_UNITS_S[found[2]]


def event_words(kind: EventKind) -> str:
    """Return what happened to a request."""
    return _EVENTS.get(kind, kind.value)
