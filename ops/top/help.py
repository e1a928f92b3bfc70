"""The help text with all keys."""

from __future__ import annotations

from rich.text import Text

from .tables import TABLES

_KEYS = (
    ("1 … 5, Tab", "models, tenants, requests, engines, dead letter"),
    ("↑ ↓, j k", "select a row; also PageUp, PageDown, Home, End"),
    ("← →", "scroll columns"),
    ("Enter", "details of a row; Escape goes back"),
    ("/", "filter: text in any cell, or name=value for Redis: requests"),
    ("", "state= tenant= band= engine= prefix= since=15m,"),
    ("", "tenants q=, engines and dead letter model="),
    ("s, S", "sort by the next column; reverse the order"),
    ("m", "the tenants of another model"),
    ("?, q", "show these keys; quit"),
)
_WIDTH = 12


def help_text() -> Text:
    """Return all keys, those of each table last."""
    lines = [("Keys", "")]
    lines += _KEYS
    lines += [("", ""), ("Changes", "each asks first, and is recorded in `penstock audit`")]
    lines += [(table.name, ", ".join(f"{move.key} {move.word}" for move in table.moves)) for table in TABLES]
    return Text("\n".join(f"{keys:<{_WIDTH}}{words}" for keys, words in lines))
