"""Who asks: the API key of a request, and the tenant it stands for."""

from __future__ import annotations

import time
from collections import OrderedDict

import msgspec

from ...openai.errors import OpenAIError
from ...secret_keys import key_id_of, matches
from .api_keys import PREFIX, ApiKeys

# A revoked key works for so long at most; each key is asked for in Redis so often at most.
CACHE_TTL_S = 5.0
MAX_CACHED_KEYS = 10_000


class Identity(msgspec.Struct, frozen=True):
    """On whose account a request runs; ``band`` is that of requests which name none."""

    tenant: str
    band: str | None = None
    key_id: str = ""


class Authenticator:
    """Finds the identity behind a request's ``Authorization: Bearer`` header.

    Args:
        keys: the store; None lets everybody in.
        tenant: everybody's, without a store.
    """

    def __init__(self, keys: ApiKeys | None, *, tenant: str) -> None:
        self._keys = keys
        self._anybody = Identity(tenant)
        # By the key's public part: what Redis said of it, and until when that counts.
        self._cached: OrderedDict[str, tuple[float, bytes, Identity]] = OrderedDict()

    async def identify(self, authorization: str | None) -> Identity:
        """Return who asks.

        Raises:
            OpenAIError: 401, there is no key, or not a valid one.
        """
        if self._keys is None:
            return self._anybody
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _refused("pass an API key as Authorization: Bearer KEY")
        key = key.strip()
        key_id = key_id_of(PREFIX, key)
        if key_id is None:
            raise _refused("the API key is not valid")
        digest, identity = await self._look_up(self._keys, key_id)
        if identity is None or not matches(key, digest):
            raise _refused("the API key is not valid")
        return identity

    async def _look_up(self, keys: ApiKeys, key_id: str) -> tuple[bytes, Identity | None]:
        cached = self._cached.get(key_id)
        now = time.monotonic()
        if cached is not None and now < cached[0]:
            return cached[1], cached[2]
        self._cached.pop(key_id, None)
        record = await keys.get(key_id)
        if record is None:  # not remembered: made-up keys would fill the cache
            return b"", None
        identity = Identity(record.tenant, record.band or None, key_id)
        self._cached[key_id] = (now + CACHE_TTL_S, record.digest, identity)
        if len(self._cached) > MAX_CACHED_KEYS:
            self._cached.popitem(last=False)
        return record.digest, identity


def _refused(message: str) -> OpenAIError:
    return OpenAIError(401, message, type="authentication_error", code="invalid_api_key")
