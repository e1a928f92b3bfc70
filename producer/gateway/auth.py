"""Store API keys, and authenticate requests: each key belongs to a tenant."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from ...shared.connection import CommandConnection
from ...shared.keys import Keys
from ...shared.values.names import check_name
from ..control.secret_keys import KeyStore, SecretKey, check_key_name, key_id_of, make_key, matches
from ..openai.errors import OpenAIError

PREFIX = "psk"

# How long a key read from Redis is cached: a revoked key works at most this much longer.
CACHE_TTL_S = 5.0
MAX_CACHED_KEYS = 10_000


class ApiKey(SecretKey, kw_only=True, omit_defaults=True):
    """Stored record of one key. ``band`` applies to requests that name none; empty for the queue's default."""

    tenant: str
    band: str = ""
    name: str = ""


class ApiKeys(KeyStore[ApiKey]):
    """The API keys of one deployment. Gateways accept a revoked key for at most ``CACHE_TTL_S`` longer."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        super().__init__(connection, keys, keys.api_keys(), ApiKey, "api_key")

    async def create(self, tenant: str, *, band: str = "", name: str = "") -> tuple[str, ApiKey]:
        """Create a key. Returns the key itself, which cannot be read again, and its stored record.

        Raises:
            ValidationError: tenant, band or name is invalid.
        """
        check_name("tenant", tenant)
        if band:
            check_name("band", band)
        check_key_name(name)
        key, key_id, digest = make_key(PREFIX)
        record = ApiKey(key_id=key_id, digest=digest, tenant=tenant, band=band, name=name, created_at=time.time())
        await self._store(record, tenant=tenant, name=name)
        return key, record


class Identity(msgspec.Struct, frozen=True):
    """The account that a request is charged to. ``band`` applies to requests that name none.

    ``key_name`` is the id of a key without a name.
    """

    tenant: str
    band: str | None = None
    key_id: str = ""
    key_name: str = ""


class Authenticator:
    """Maps a request's key, in the header ``Authorization: Bearer`` or ``x-api-key``, to an identity.

    Args:
        keys: the store; None accepts every request.
        tenant: the tenant of every request if there is no store.
    """

    def __init__(self, keys: ApiKeys | None, *, tenant: str) -> None:
        self._keys = keys
        self._default_identity = Identity(tenant)
        # Keyed by the key's public part: expiry time, digest and identity.
        self._cached: OrderedDict[str, tuple[float, bytes, Identity]] = OrderedDict()

    async def identify(self, headers: Mapping[str, str]) -> Identity:
        """Return the identity of the caller.

        Raises:
            OpenAIError: 401, the key is missing or invalid.
        """
        if self._keys is None:
            return self._default_identity
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        key = key.strip()
        if not key:
            raise _unauthorized("pass an API key as Authorization: Bearer KEY, or as x-api-key: KEY")
        key_id = key_id_of(PREFIX, key)
        if key_id is None:
            raise _unauthorized("the API key is not valid")
        digest, identity = await self._look_up(self._keys, key_id)
        if identity is None or not matches(key, digest):
            raise _unauthorized("the API key is not valid")
        return identity

    async def _look_up(self, keys: ApiKeys, key_id: str) -> tuple[bytes, Identity | None]:
        cached = self._cached.get(key_id)
        now = time.monotonic()
        if cached is not None and now < cached[0]:
            return cached[1], cached[2]
        self._cached.pop(key_id, None)
        record = await keys.get(key_id)
        if record is None:  # not cached, since made-up keys would fill the cache
            return b"", None
        identity = Identity(record.tenant, record.band or None, key_id, record.name or key_id)
        self._cached[key_id] = (now + CACHE_TTL_S, record.digest, identity)
        if len(self._cached) > MAX_CACHED_KEYS:
            self._cached.popitem(last=False)
        return record.digest, identity


def _unauthorized(message: str) -> OpenAIError:
    return OpenAIError(401, message, type="authentication_error", code="invalid_api_key")
