"""API keys: what is kept of them, and where. Each belongs to a tenant."""

from __future__ import annotations

import time

from ....shared.connection import CommandConnection
from ....shared.keys import Keys
from ....shared.names import check_name
from ...secret_keys import KeyStore, SecretKey, check_key_name, make_key

PREFIX = "psk"


class ApiKey(SecretKey, kw_only=True, omit_defaults=True):
    """What is kept of one key. ``band`` is that of requests which name none; empty for the queue's default."""

    tenant: str
    band: str = ""
    name: str = ""


class ApiKeys(KeyStore[ApiKey]):
    """The keys of one deployment. Gateways let one that is revoked in for ``auth.CACHE_TTL_S`` more at most."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        super().__init__(connection, keys, keys.api_keys(), ApiKey, "api_key")

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
        await self._keep(record, tenant=tenant, name=name)
        return key, record
