"""Formatting of numbers, times and fields for people."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime

from ..shared.errors import ValidationError
from ..shared.queue.lifecycle import EventKind, RequestState
from ..shared.queue.stats import ModelState, Readiness
from ..shared.values.shown import shown

# Seconds, name, and the count from which the next unit is used: "90 s" is more precise than "2 min".
_UNITS = ((1, "s", 120), (60, "min", 120), (3600, "h", 48))
_AGE = re.compile(r"(\d{1,9})([smhd])")
_AGE_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# Events whose names need other words.
_EVENTS = {
    EventKind.HANDED_BACK: "requeued",
    EventKind.RECLAIMED: "requeued after the death of its engine",
    EventKind.CONTINUED: "queued with more input",
    EventKind.AWAITING_INPUT: "waits for input",
}
# States of a request that have other names for people.
_STATES = {
    RequestState.QUEUED: "waiting",
    RequestState.CLAIMED: "running",
    RequestState.AWAITING_INPUT: "waiting for input",
}


def requests_in_words(number: int) -> str:
    """Return a number of requests: "1 request", "2 requests"."""
    return "1 request" if number == 1 else f"{number} requests"


def format_duration(seconds: float | None) -> str:
    """Return a duration in a fitting unit, "0.4 s" or "3 min"; "-" if it is unknown."""
    if seconds is None or math.isnan(seconds):
        return "-"
    if math.isinf(seconds):
        return "for ever"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for size, unit, limit in _UNITS:
        if round(seconds / size) < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def format_time(at: float) -> str:
    """Return a Unix time as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def format_sheet(fields: Mapping[str, str]) -> str:
    """Return one line for each field, the values aligned."""
    return "\n".join(f"{name + ':':<12}{value}" for name, value in fields.items())


def parse_when(field: str, text: str, now: float) -> float:
    """Return the Unix time of an age such as "15m", or of a time of UTC such as "2026-11-29 14:05".

    Raises:
        ValidationError: ``text`` is neither; the message names ``field``.
    """
    text = text.strip().replace("T", " ")
    if (match := _AGE.fullmatch(text)) is not None:
        return now - int(match[1]) * _AGE_UNITS_S[match[2]]
    for form in ("%Y-%m-%d %H:%M", "%Y-%m-%d"):
        with contextlib.suppress(ValueError):
            return datetime.strptime(text, form).replace(tzinfo=UTC).timestamp()
    raise ValidationError(
        f"{field} must be an age or a time of UTC, such as 15m or 2026-11-29 14:05, got {shown(text)}"
    )


def parse_span(fields: Mapping[str, str], now: float) -> dict[str, float]:
    """Return the Unix times of "since" and "until", those that ``fields`` has.

    Raises:
        ValidationError: as ``parse_when``.
    """
    return {name: parse_when(name, fields[name], now) for name in ("since", "until") if fields.get(name)}


def event_words(kind: EventKind) -> str:
    """Return an event of a request in words."""
    return _EVENTS.get(kind, kind.value)


def state_words(state: str) -> str:
    """Return a state of a request in words; a state of a newer version as it is."""
    return _STATES.get(RequestState(state), state) if state in tuple(RequestState) else state


_READINESS = {
    ModelState.LOADED: "loaded",
    ModelState.LOADING: "loading",
    ModelState.ASLEEP: "asleep",
    ModelState.UNLOADED: "on disk",
    ModelState.BROKEN: "broken",
}


def readiness_words(readiness: Readiness) -> str:
    """Return the state of a model in words: "asleep, ready in about 4 s"."""
    if readiness.state is ModelState.UNLOADED and readiness.in_s is None:
        return "no engine"
    words = _READINESS[readiness.state]
    if readiness.error:
        return f"{words}: {readiness.error}"
    if readiness.state is ModelState.LOADED or readiness.in_s is None:
        return words
    return f"{words}, ready in about {format_duration(readiness.in_s)}"
