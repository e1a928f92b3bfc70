"""API keys: what is kept of them, and where.

A key is ``psk-ID-SECRET``. Redis holds, by the id, the SHA-256 of the whole key: a key has 256 random bits, so nobody
finds it by trying, and a slow hash, which is for words that people choose, would only cost each request its time. The
key itself is shown once, when it is made.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time

import msgspec

from ...shared.connection import CommandConnection
from ...shared.encodable import check_text
from ...shared.errors import ValidationError
from ...shared.keys import Keys, check_name
from ...shared.shown import shown

_FORM = re.compile(r"psk-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")
MAX_KEY_NAME_CHARS = 200


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

    async def create(self, tenant: str, *, band: str = "", name: str = "") -> tuple[str, ApiKey]:
        """Make a key; returns it, which nobody can read again, and what is kept of it.

        Raises:
            ValidationError: tenant, band or name cannot be one.
        """
        check_name("tenant", tenant)
        if band:
            check_name("band", band)
        if len(name) > MAX_KEY_NAME_CHARS or not name.isprintable():
            raise ValidationError(
                f"name must have at most {MAX_KEY_NAME_CHARS} printable characters, got {shown(name)}"
            )
        key_id = secrets.token_hex(6)
        key = f"psk-{key_id}-{secrets.token_urlsafe(32)}"
        record = ApiKey(key_id=key_id, digest=_digest(key), tenant=tenant, band=band, name=name, created_at=time.time())
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
        return bool(await self._connection.execute("HDEL", self._key, check_text("key_id", key_id)))


def key_id_of(key: str) -> str | None:
    """Return the public part of a key; None if it has not the form of one."""
    match = _FORM.fullmatch(key)
    return None if match is None else match[1]


def matches(key: str, digest: bytes) -> bool:
    """Whether ``digest`` is that of ``key``; takes the same time wherever they differ."""
    return hmac.compare_digest(_digest(key), digest)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
