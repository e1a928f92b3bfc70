"""Parts of messages about models: lists of names, and the texts of exceptions."""

from __future__ import annotations

from collections.abc import Iterable

_MAX_NAMED = 4
_MAX_LEN = 300


def few(names: Iterable[str]) -> str:
    """Return the first of ``names``, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - _MAX_NAMED} more" if len(listed) > _MAX_NAMED else ""
    return ", ".join(listed[:_MAX_NAMED]) + more


def first_line(error: Exception) -> str:
    """Return the text of ``error`` for a message of one line."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    text = lines[0] if lines else ""
    # For an invalid field, the first line names the field, and the second the reason.
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    return text[:_MAX_LEN] or type(error).__name__
