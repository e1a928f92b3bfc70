"""The stored record of a response. Everything else is derived from it and the request's log."""

from __future__ import annotations

import msgspec

from ....shared.messages import WIRE_VERSION
from ..parsers import Parsers
from .body import ResponseBody
from .items import Item


class StoredResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Record of a response, as JSON. Old bytes must still decode: fields are added with a default, never removed.

    Args:
        id: also the id of the request.
        body: the body without its input, which is ``items``.
        history: all earlier items, so that a conversation continues after an earlier response was deleted or expired.
        parsers: parsers of the answer, fixed at creation, independent of the gateway that reads it.
    """

    version: int = WIRE_VERSION
    id: str
    created_at: int
    model: str
    body: ResponseBody
    history: list[Item] = []
    items: list[Item] = []
    parsers: Parsers = Parsers()
