"""Bodies of the endpoints that generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.producer.inputs.options import RequestOptions
from penstock.producer.openai import endpoints
from penstock.producer.openai.parsers import Parsers
from penstock.producer.openai.prepared import Prepared
from penstock.producer.openai.responses.body import ResponseBody, check_body
from penstock.producer.openai.responses.items import read_items
from penstock.producer.openai.responses.prepared import PreparedResponse, prepare_response
from penstock.producer.openai.responses.response_store import StoredResponse


def prepare(path: str, body: bytes | Mapping[str, Any], parsers: Parsers | None = None) -> Prepared:
    """``endpoints.prepare`` for one of them."""
    prepared = endpoints.prepare(path, body, parsers)
    assert isinstance(prepared, Prepared)
    return prepared


def prepare_to_store(body: Mapping[str, Any]) -> PreparedResponse:
    """Return the request of a response, with the record that is stored of it."""
    decoded: ResponseBody = endpoints.decode(endpoints.RESPONSES, body).body
    check_body(decoded)
    items = read_items(decoded.input, "resp_ab")
    return prepare_response(StoredResponse(id="resp_ab", created_at=1, model="demo", body=decoded, items=items))


def template_kwargs(options: RequestOptions) -> Mapping[str, Any]:
    """Return the arguments of the chat template, which must be there."""
    kwargs = options.get("chat_template_kwargs")
    assert kwargs is not None
    return kwargs
