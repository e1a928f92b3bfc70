"""Timeline of a request as spans: where it waited, which engines it ran on, why each span ended."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ...shared.queue.lifecycle import EventKind, RequestEvent, RequestState
from ..words import event_words

# Of a total width of 100, so that spans without duration are visible.
LEAST_WIDTH = 0.6
_WORDS = {RequestState.QUEUED: "waits", RequestState.CLAIMED: "runs", RequestState.AWAITING_INPUT: "awaits input"}


def spans_of(events: Sequence[RequestEvent], now: float) -> list[dict[str, Any]]:
    """Return a row for each span between two events. The last span lasts until ``now`` unless the request has ended.

    ``first_token`` is the number of tokens before the span, ``tokens`` the number that it added. ``then`` is the event
    that ended the span, ``why`` its cause; "" if unknown. ``ended_at`` is None for the current span.
    """
    ends: list[RequestEvent | None] = [*events[1:], None]
    return [
        _span(event, end, now)
        for event, end in zip(events, ends, strict=True)
        if end is not None or not event.state.is_end
    ]


def _span(event: RequestEvent, end: RequestEvent | None, now: float) -> dict[str, Any]:
    ended_at = None if end is None else end.at
    return {
        "what": _WORDS.get(event.state, "rests"),
        "engine": event.engine_id if event.kind is EventKind.CLAIMED else "",
        "epoch": event.epoch if event.kind is EventKind.CLAIMED else None,
        "began_at": event.at,
        "ended_at": ended_at,
        "took_s": max(0.0, (now if ended_at is None else ended_at) - event.at),
        "first_token": event.num_output_tokens,
        "tokens": 0 if end is None else max(0, end.num_output_tokens - event.num_output_tokens),
        "then": "" if end is None else event_words(end.kind),
        "why": "" if end is None else end.cause,
    }


def bars_of(spans: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return start and width of each span's bar, of a total width of 100."""
    if not spans:
        return []
    began_at = spans[0]["began_at"]
    whole_s = max(span["began_at"] - began_at + span["took_s"] for span in spans) or 1.0
    bars = []
    for span in spans:
        width = max(LEAST_WIDTH, 100 * span["took_s"] / whole_s)
        start = 100 * (span["began_at"] - began_at) / whole_s
        bars.append((round(min(start, 100 - width), 2), round(width, 2)))
    return bars


def handovers(spans: Sequence[dict[str, Any]]) -> int:
    """Return how often another engine, or a restarted one, resumed the request."""
    runs = [span for span in spans if span["engine"]]
    return sum(later["epoch"] != before["epoch"] for before, later in itertools.pairwise(runs))
