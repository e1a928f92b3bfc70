"""Bodies of the endpoints that generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.producer.inputs.options import RequestOptions
from penstock.producer.openai import endpoints
from penstock.producer.openai.parsers import Parsers
from penstock.producer.openai.prepared import Prepared


def prepare(path: str, body: bytes | Mapping[str, Any], parsers: Parsers | None = None) -> Prepared:
    """``endpoints.prepare`` for one of them."""
    prepared = endpoints.prepare(path, body, parsers)
    assert isinstance(prepared, Prepared)
    return prepared


def template_kwargs(options: RequestOptions) -> Mapping[str, Any]:
    """Return the arguments of the chat template, which must be there."""
    kwargs = options.get("chat_template_kwargs")
    assert kwargs is not None
    return kwargs
