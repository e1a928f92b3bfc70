"""Records of responses in Redis, by tenant, stored about as long as the results of their requests."""

from __future__ import annotations

import re

import msgspec

from ....shared.connection import CommandConnection
from ....shared.errors import BrokerError
from ....shared.keys import Keys
from ....shared.messages import WIRE_VERSION
from ....shared.values.shown import shown
from ..parsers import Parsers
from .body import ResponseBody
from .items import Item

# Deadline of a request, so its record never expires before it does.
MAX_RUN_S = 24 * 3600.0
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
_encoder = msgspec.json.Encoder()


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

    @property
    def conversation(self) -> list[Item]:
        """All input items."""
        return [*self.history, *self.items]


_decoder = msgspec.json.Decoder(StoredResponse)


class ResponseStore:
    """Reads and writes records. ``result_ttl_s`` is how long the result of a request is stored after its end."""

    def __init__(self, commands: CommandConnection, keys: Keys, *, result_ttl_s: float) -> None:
        self._commands = commands
        self._keys = keys
        self._result_ttl_ms = max(1, int(result_ttl_s * 1000))
        self._max_ttl_ms = self._result_ttl_ms + int(MAX_RUN_S * 1000)

    async def put(self, tenant: str, record: StoredResponse) -> None:
        """Store a record for as long as its request may take and its result may be read."""
        key = self._keys.response(tenant, record.id)
        await self._commands.execute("SET", key, _encoder.encode(record), "PX", self._max_ttl_ms)

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a tenant's record; None if the tenant has none with this id.

        Raises:
            BrokerError: the bytes are not a valid record.
        """
        if not _RESPONSE_ID.fullmatch(response_id):
            return None
        data = await self._commands.execute("GET", self._keys.response(tenant, response_id))
        try:
            return None if data is None else _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise BrokerError(f"the record of response {shown(response_id)} cannot be read: {error}") from error

    async def shorten_ttl(self, tenant: str, response_id: str) -> None:
        """Let a record expire with the result of its request, which has ended."""
        await self._commands.execute("PEXPIRE", self._keys.response(tenant, response_id), self._result_ttl_ms)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete a record."""
        await self._commands.execute("UNLINK", self._keys.response(tenant, response_id))
