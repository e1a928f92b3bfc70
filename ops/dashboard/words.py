"""Filters of the templates: figures and texts as people read them, and parts of addresses."""

from __future__ import annotations

from urllib.parse import quote, urlencode

import msgspec

from ..views.words import as_unit, duration, length_of_time, moment, number, percent, plain, size


def segment(text: object) -> str:
    """A part of a path."""
    return quote(str(text), safe="")


def query(**values: object) -> str:
    """A query string of what is not empty, with its question mark."""
    given = {name: value for name, value in values.items() if value not in (None, "")}
    return f"?{urlencode(given)}" if given else ""


def json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()


FILTERS = {
    "duration": duration,
    "length_of_time": length_of_time,
    "as_unit": as_unit,
    "moment": moment,
    "number": number,
    "percent": percent,
    "size": size,
    "plain": plain,
    "segment": segment,
    "pretty_json": json,
}
