"""Which requests a list shows: from a page's query to a filter."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ...shared.broker import STATE_WORDS, RequestFilter
from ..words import parse_age

# Names of a query that a filter is made of.
NAMES = ("state", "tenant", "band", "engine", "prefix", "since")
# What a list is about without a state.
LIVE = ("running", "waiting")
STATES = STATE_WORDS


def filter_of(params: Mapping[str, str]) -> RequestFilter:
    """Return what a query or a form asks for.

    Raises:
        ValidationError: ``state`` is none, or ``since`` no age.
    """
    return RequestFilter(
        states=(params["state"],) if params.get("state") else LIVE,
        tenant=params.get("tenant", ""),
        band=params.get("band", ""),
        engine_id=params.get("engine", ""),
        id_prefix=params.get("prefix", ""),
        since=time.time() - parse_age(params["since"]) if params.get("since") else 0.0,
    )


def names_some(params: Mapping[str, str]) -> bool:
    """Whether a query leaves any out of all that runs and waits."""
    return any(params.get(name) for name in NAMES)


def words_of(params: Mapping[str, str]) -> str:
    """What a filter takes, in words: "running, tenant acme, since 15m"."""
    told = [params.get("state") or "running or waiting"]
    told += [f"{name} {params[name]}" for name in NAMES[1:] if params.get(name)]
    return ", ".join(told)
