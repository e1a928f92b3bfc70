"""What is kept of a response beside the log of its request: everything else follows from the two."""

from __future__ import annotations

import msgspec

from ....shared.messages import WIRE_VERSION
from ..parsers import Parsers
from .body import ResponseBody
from .items import Item


class StoredResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request for a response, as JSON. Old bytes still decode: fields are added with a default, never taken away.

    ``body`` is without its input: that is ``items``. ``history`` is what came before, whole, so that a conversation
    goes on when an earlier response of it has been deleted or has expired. ``parsers`` read the answer, whatever the
    gateway that reads it would choose today. The request's id is the response's.
    """

    version: int = WIRE_VERSION
    id: str
    created_at: int
    model: str
    body: ResponseBody
    history: list[Item] = []
    items: list[Item] = []
    parsers: Parsers = Parsers()
