"""Bodies of the endpoints that generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.producer.openai import endpoints
from penstock.producer.openai.parsers import Parsers
from penstock.producer.openai.prepared import Prepared


def prepare(path: str, body: bytes | Mapping[str, Any], parsers: Parsers | None = None) -> Prepared:
    """``endpoints.prepare`` for one of them."""
    prepared = endpoints.prepare(path, body, parsers)
    assert isinstance(prepared, Prepared)
    return prepared
