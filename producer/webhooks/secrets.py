"""Secrets that sign events: one per tenant, or per tenant and URL."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from redis.exceptions import NoPermissionError

from ...shared.connection import CommandConnection
from ...shared.deployment.records import decode_records
from ...shared.errors import ValidationError
from ...shared.keys import Keys
from ...shared.redis_access.script import Script, script_of
from ...shared.values.checks import check_text
from ...shared.values.names import check_name
from ...shared.values.shown import shown
from .events import WebhookSecret

PREFIX = "whsec_"
# Standard Webhooks requires 24 to 64 bytes.
NUM_BYTES, MIN_BYTES, MAX_BYTES = 32, 24, 64
KEEP_PREVIOUS_S = 86400.0

# Member of the index of secrets that marks it as complete, including secrets of earlier versions.
INDEXED = ""

_decoder = msgspec.json.Decoder(WebhookSecret)

# KEYS: secrets, their index. ARGV: tenant and URL, then the secret.
_CREATE = script_of(
    "webhook_secret_create",
    """
redis.call('SADD', KEYS[2], ARGV[1])
return redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2])
""",
)
_PUT = script_of(
    "webhook_secret_put",
    """
redis.call('SADD', KEYS[2], ARGV[1])
return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
""",
)
_DELETE = script_of(
    "webhook_secret_delete",
    """
redis.call('SREM', KEYS[2], ARGV[1])
return redis.call('HDEL', KEYS[1], ARGV[1])
""",
)
# ARGV: the member that marks the index as complete.
_INDEX = script_of(
    "webhook_secret_index",
    """
redis.call('SADD', KEYS[2], ARGV[1])
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do redis.call('SADD', KEYS[2], field) end
return 1
""",
)


class SecretStore:
    """The secrets of one namespace. They are stored unencrypted, because an HMAC needs the secret itself.

    All methods raise ``RedisUnavailableError`` when Redis is away for longer than the connection retries.
    """

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._key = keys.webhook_secrets()
        self._index_key = keys.webhooks_signed()

    async def create(self, tenant: str, url: str = "", secret: str | None = None) -> WebhookSecret:
        """Create a secret of a tenant for one URL, or for all URLs without a separate one. Random unless passed.

        Raises:
            ValidationError: one exists already, or ``secret`` is invalid.
        """
        record = WebhookSecret(
            tenant=check_name("tenant", tenant),
            url=check_text("url", url),
            current=new_secret() if secret is None else check_secret(secret),
            created_at=time.time(),
        )
        if not await self._run_script(_CREATE, _field(tenant, url), msgspec.json.encode(record)):
            if await self.get(tenant, url) == record:
                return record  # the call was sent again after a lost reply
            raise ValidationError(
                f"{_describe(tenant, url)} has a secret; 'penstock webhook secret rotate' replaces it"
            )
        return record

    async def rotate(
        self, tenant: str, url: str = "", secret: str | None = None, *, keep_previous_s: float = KEEP_PREVIOUS_S
    ) -> WebhookSecret:
        """Replace a secret. The previous one also signs for ``keep_previous_s``; any older one no longer signs.

        Raises:
            ValidationError: there is no secret yet, or ``secret`` is invalid.
        """
        before = await self.get(tenant, url)
        if before is None:
            raise ValidationError(
                f"{_describe(tenant, url)} has no secret; 'penstock webhook secret create' creates one"
            )
        record = msgspec.structs.replace(
            before,
            current=new_secret() if secret is None else check_secret(secret),
            created_at=time.time(),
            previous=before.current,
            previous_until=time.time() + keep_previous_s,
        )
        await self._run_script(_PUT, _field(tenant, url), msgspec.json.encode(record))
        return record

    async def get(self, tenant: str, url: str = "") -> WebhookSecret | None:
        """Return the secret of exactly this tenant and URL; None if there is none."""
        data = await self._connection.execute("HGET", self._key, _field(tenant, url))
        return None if data is None else _decoder.decode(data)

    async def find(self, tenant: str, url: str) -> WebhookSecret | None:
        """Return the secret that signs a tenant's events to a URL; None if there is none."""
        specific, general = await self._connection.execute("HMGET", self._key, _field(tenant, url), _field(tenant, ""))
        data = specific or general
        return None if data is None else _decoder.decode(data)

    async def list(self) -> list[WebhookSecret]:
        """Return all secrets, sorted by tenant and URL."""
        flat = await self._connection.execute("HGETALL", self._key)
        pairs = [(field.decode(), data) for field, data in zip(flat[::2], flat[1::2], strict=True)]
        secrets = decode_records("webhook secret", pairs, WebhookSecret)
        return sorted(secrets, key=lambda secret: (secret.tenant, secret.url))

    async def delete(self, tenant: str, url: str = "") -> bool:
        """Delete a secret. Returns False if there is none. Events signed only by it fail until there is another."""
        return bool(await self._run_script(_DELETE, _field(tenant, url)))

    async def index(self) -> None:
        """Add the secrets that versions without an index have created to the index."""
        await self._run_script(_INDEX, INDEXED)

    async def _run_script(self, script: Script, *args: str | bytes) -> Any:
        return await self._connection.run_script(script, [self._key, self._index_key], [*args])


class SignedTargets:
    """Tells which tenants and URLs have a secret. Clients may read that, but not the secrets."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._index_key = keys.webhooks_signed()
        self._secrets_key = keys.webhook_secrets()

    async def has(self, tenant: str, url: str) -> bool:
        """Return whether a secret signs a tenant's events to a URL."""
        fields = (_field(tenant, url), _field(tenant, ""))
        if await self._are_any("SISMEMBER", self._index_key, fields):
            return True
        if await self._are_any("SISMEMBER", self._index_key, [INDEXED]):
            return False
        # No jobs process of this version has run yet. Users of older ACL files may read the secrets.
        return await self._are_any("HEXISTS", self._secrets_key, fields)

    async def _are_any(self, command: str, key: str, fields: Iterable[bytes | str]) -> bool:
        try:
            return any([await self._connection.execute(command, key, field) for field in fields])
        except NoPermissionError:
            return False


def new_secret() -> str:
    return PREFIX + base64.b64encode(os.urandom(NUM_BYTES)).decode()


def check_secret(secret: str) -> str:
    """Return ``secret`` if it is valid for Standard Webhooks.

    Raises:
        ValidationError: it is invalid.
    """
    try:
        num_bytes = len(base64.b64decode(secret.removeprefix(PREFIX), validate=True))
    except (TypeError, AttributeError, ValueError):  # base64's own is a ValueError
        num_bytes = 0
    if not secret.startswith(PREFIX) or not MIN_BYTES <= num_bytes <= MAX_BYTES:
        raise ValidationError(
            f"a secret must be {PREFIX!r} and {MIN_BYTES} to {MAX_BYTES} bytes in base64; omit it to generate one"
        )
    return secret


def no_secret(tenant: str) -> str:
    command = f"'penstock webhook secret create --tenant {tenant}'"
    return f"tenant {shown(tenant)} has no webhook secret; create one with {command}"


def _field(tenant: str, url: str) -> bytes:
    return msgspec.json.encode([check_name("tenant", tenant), check_text("url", url)])


def _describe(tenant: str, url: str) -> str:
    return f"tenant {shown(tenant)}" + (f" with {url}" if url else "")
