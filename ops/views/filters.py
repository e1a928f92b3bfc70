"""Conversion of a page's query to a filter of requests."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ...shared.broker import STATE_WORDS, RequestFilter
from ..words import parse_age

# Query parameters that make a filter.
NAMES = ("state", "tenant", "band", "engine", "prefix", "since")
# States that a list shows by default.
LIVE = ("running", "waiting")
STATES = STATE_WORDS


def filter_of(params: Mapping[str, str]) -> RequestFilter:
    """Return the filter of a query or a form.

    Raises:
        ValidationError: ``state`` is unknown, or ``since`` is not an age.
    """
    return RequestFilter(
        states=(params["state"],) if params.get("state") else LIVE,
        tenant=params.get("tenant", ""),
        band=params.get("band", ""),
        engine_id=params.get("engine", ""),
        id_prefix=params.get("prefix", ""),
        since=time.time() - parse_age(params["since"]) if params.get("since") else 0.0,
    )


def has_filter(params: Mapping[str, str]) -> bool:
    """Return whether a query restricts the list of running and waiting requests."""
    return any(params.get(name) for name in NAMES)


def describe_filter(params: Mapping[str, str]) -> str:
    """Return a filter in words: "running, tenant acme, since 15m"."""
    parts = [params.get("state") or "running or waiting"]
    parts += [f"{name} {params[name]}" for name in NAMES[1:] if params.get(name)]
    return ", ".join(parts)
