"""Filters of the templates: formatting of values, and parts of URLs."""

from __future__ import annotations

from urllib.parse import quote, urlencode

import msgspec

from ..views.words import as_unit, duration, length_of_time, moment, number, percent, plain, size


def segment(text: object) -> str:
    """Return a part of a path, percent-encoded."""
    return quote(str(text), safe="")


def query(**values: object) -> str:
    """Return a query string of the values that are not empty, with its question mark."""
    params = {name: value for name, value in values.items() if value not in (None, "")}
    return f"?{urlencode(params)}" if params else ""


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
