"""Filters of pages that a user has saved by name, in a cookie of the browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote, unquote

import msgspec

from ...shared.errors import ValidationError

FILTERS_COOKIE = "penstock_filters"
# Browsers store cookies of up to 4 KB.
MAX_COOKIE_CHARS = 3500
MAX_NAME_CHARS = 60


class SavedFilter(msgspec.Struct, array_like=True, frozen=True):
    """The query of a page under a name."""

    page: str
    name: str
    query: str


def saved_filters(cookies: Mapping[str, str]) -> list[SavedFilter]:
    """Return the saved filters of a browser; [] if its cookie is missing or not ours."""
    text = cookies.get(FILTERS_COOKIE, "")
    try:
        return msgspec.json.decode(unquote(text), type=list[SavedFilter]) if len(text) <= MAX_COOKIE_CHARS else []
    except msgspec.DecodeError:
        return []


def filters_after(filters: Sequence[SavedFilter], page: str, form: Mapping[str, str], query: str) -> str:
    """Return the cookie after a form that saves the query of a page under a name, or removes the name.

    Raises:
        ValidationError: the name is missing or too long, or the browser cannot store more.
    """
    name = form.get("name", "").strip()
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise ValidationError(f"name must have 1 to {MAX_NAME_CHARS} characters, got {len(name)}")
    filters = [one for one in filters if (one.page, one.name) != (page, name)]
    if not form.get("remove"):
        filters.append(SavedFilter(page, name, query))
    cookie = quote(msgspec.json.encode(filters))
    if len(cookie) > MAX_COOKIE_CHARS:
        raise ValidationError("this browser can store no more filters; remove one")
    return cookie
