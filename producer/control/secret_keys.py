"""Secret keys that grant access: their form, their stored records, and the keys of operators.

A key is ``PREFIX-ID-SECRET``. Redis stores the SHA-256 of the whole key by its id. A key has 256 random bits, so it
cannot be guessed; a slow hash, which protects passwords chosen by people, would only delay each request. The key itself
is shown once, when it is created.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
import secrets
import time
from typing import Generic, TypeVar

import msgspec

from ...shared.connection import CommandConnection
from ...shared.deployment.audit import Audit
from ...shared.deployment.records import decode_records
from ...shared.errors import ValidationError
from ...shared.keys import Keys
from ...shared.values.checks import check_text
from ...shared.values.shown import shown

_FORM = re.compile(r"([a-z]+)-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")
MAX_KEY_NAME_CHARS = 200
OPERATOR_PREFIX = "pso"


class SecretKey(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Stored record of any key. JSON, so that people can read it; ``digest`` is base64 there."""

    version: int = 1
    key_id: str
    digest: bytes
    created_at: float = 0.0


K = TypeVar("K", bound=SecretKey)


class KeyStore(Generic[K]):
    """The keys of one kind, in a hash by their ids. Creating and revoking a key writes an audit entry.

    Args:
        key: the Redis key of the hash.
        kind: name in the audit, such as "api_key".
    """

    def __init__(self, connection: CommandConnection, keys: Keys, key: str, record: type[K], kind: str) -> None:
        self._connection = connection
        self._audit = Audit(connection, keys)
        self._key = key
        self._record = record
        self._kind = kind

    async def get(self, key_id: str) -> K | None:
        """Return the record of a key; None if no key has this id."""
        data = await self._connection.execute("HGET", self._key, check_text("key_id", key_id))
        return None if data is None else msgspec.json.decode(data, type=self._record)

    async def list(self) -> list[K]:
        """Return the records of all keys, the oldest first."""
        flat = await self._connection.execute("HGETALL", self._key)
        pairs = [(key_id.decode(), value) for key_id, value in zip(flat[::2], flat[1::2], strict=True)]
        return sorted(decode_records(self._kind, pairs, self._record), key=lambda record: record.created_at)

    async def revoke(self, key_id: str) -> bool:
        """Remove a key, and return whether it existed. A process that has cached its record may accept it for some more
        seconds.
        """
        async with self._audit.audited(f"{self._kind}.revoke", check_text("key_id", key_id)) as details:
            details["found"] = existed = bool(await self._connection.execute("HDEL", self._key, key_id))
            return existed

    async def _store(self, record: K, **details: object) -> None:
        async with self._audit.audited(f"{self._kind}.create", record.key_id, **details):
            await self._connection.execute("HSET", self._key, record.key_id, msgspec.json.encode(record))


def make_key(prefix: str) -> tuple[str, str, bytes]:
    """Return a new key, its public id, and its digest."""
    key_id = secrets.token_hex(6)
    key = f"{prefix}-{key_id}-{secrets.token_urlsafe(32)}"
    return key, key_id, digest_of(key)


def key_id_of(prefix: str, key: str) -> str | None:
    """Return the public part of a key; None if the key has not the form of one with that prefix."""
    match = _FORM.fullmatch(key)
    return match[2] if match is not None and match[1] == prefix else None


def digest_of(key: str) -> bytes:
    """Return the stored digest of a key."""
    return hashlib.sha256(key.encode()).digest()


def matches(key: str, digest: bytes) -> bool:
    """Return whether ``digest`` is that of ``key``. Takes the same time wherever they differ."""
    return hmac.compare_digest(digest_of(key), digest)


def check_key_name(name: str) -> str:
    """Return ``name`` if it can name a key for people.

    Raises:
        ValidationError: it is too long, or cannot be printed.
    """
    if len(name) > MAX_KEY_NAME_CHARS or not name.isprintable():
        raise ValidationError(f"name must have at most {MAX_KEY_NAME_CHARS} printable characters, got {shown(name)}")
    return name


class Role(enum.StrEnum):
    """Permissions of an operator: view; also pause, replay, cancel and set shares; also purge and manage keys."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def covers(self, needed: Role) -> bool:
        """Return whether this role permits an action that needs the role ``needed``."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


class OperatorKey(SecretKey, kw_only=True, omit_defaults=True):
    """Stored record of an operator's key."""

    name: str
    role: Role = Role.VIEWER
    sees_contents: bool = False


class OperatorKeys(KeyStore[OperatorKey]):
    """The operators' keys of one deployment. The sessions of a key end when it is revoked."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        super().__init__(connection, keys, keys.operator_keys(), OperatorKey, "operator_key")

    async def create(
        self, name: str, role: Role = Role.VIEWER, *, sees_contents: bool = False
    ) -> tuple[str, OperatorKey]:
        """Create a key. Return the key, which cannot be read again, and its record.

        Args:
            name: the person who has the key; shown in the audit.
            sees_contents: whether prompts and outputs are shown.

        Raises:
            ValidationError: name or role is invalid.
        """
        if not check_key_name(name):
            raise ValidationError("name must say who has the key, got an empty string")
        if role not in tuple(Role):
            raise ValidationError(f"role must be one of {', '.join(Role)}, got {shown(role)}")
        key, key_id, digest = make_key(OPERATOR_PREFIX)
        record = OperatorKey(
            key_id=key_id,
            digest=digest,
            name=name,
            role=Role(role),
            sees_contents=sees_contents,
            created_at=time.time(),
        )
        await self._store(record, name=name, role=role, contents=sees_contents)
        return key, record

    async def find(self, key: str) -> OperatorKey | None:
        """Return the record of a whole key; None if the key is not valid."""
        key_id = key_id_of(OPERATOR_PREFIX, key)
        record = None if key_id is None else await self.get(key_id)
        return record if record is not None and matches(key, record.digest) else None
