"""API keys: what is kept of them, and where. Each belongs to a tenant."""

from __future__ import annotations

import time

import msgspec

from ...shared.audit import Audit
from ...shared.connection import CommandConnection
from ...shared.encodable import check_text
from ...shared.keys import Keys, check_name
from ..secret_keys import check_key_name, make_key

PREFIX = "psk"


class ApiKey(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is kept of one key. JSON, so that people can read it; ``digest`` is base64 there.

    ``band`` is that of requests which name none; empty for the queue's default.
    """

    version: int = 1
    key_id: str
    digest: bytes
    tenant: str
    band: str = ""
    name: str = ""
    created_at: float = 0.0


class ApiKeys:
    """The keys of one deployment."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._key = keys.api_keys()
        self._audit = Audit(connection, keys)

    async def create(self, tenant: str, *, band: str = "", name: str = "") -> tuple[str, ApiKey]:
        """Make a key; returns it, which nobody can read again, and what is kept of it.

        Raises:
            ValidationError: tenant, band or name cannot be one.
        """
        check_name("tenant", tenant)
        if band:
            check_name("band", band)
        check_key_name(name)
        key, key_id, digest = make_key(PREFIX)
        record = ApiKey(key_id=key_id, digest=digest, tenant=tenant, band=band, name=name, created_at=time.time())
        async with self._audit.audited("api_key.create", key_id, tenant=tenant, name=name):
            await self._connection.execute("HSET", self._key, key_id, msgspec.json.encode(record))
        return key, record

    async def get(self, key_id: str) -> ApiKey | None:
        """Return what is kept of a key; None if there is none of this id."""
        data = await self._connection.execute("HGET", self._key, check_text("key_id", key_id))
        return None if data is None else msgspec.json.decode(data, type=ApiKey)

    async def list(self) -> list[ApiKey]:
        """Return what is kept of all keys, the oldest first."""
        values = await self._connection.execute("HVALS", self._key)
        return sorted((msgspec.json.decode(value, type=ApiKey) for value in values), key=lambda key: key.created_at)

    async def revoke(self, key_id: str) -> bool:
        """Remove a key; returns whether there was one. Gateways let it in for ``auth.CACHE_TTL_S`` more at most."""
        async with self._audit.audited("api_key.revoke", check_text("key_id", key_id)) as told:
            told["found"] = was_there = bool(await self._connection.execute("HDEL", self._key, key_id))
            return was_there
