"""Keys of the people who run a deployment: a name, a role, and whether they may see what requests say."""

from __future__ import annotations

import enum
import time

import msgspec

from ..shared.audit import Audit
from ..shared.connection import CommandConnection
from ..shared.encodable import check_text
from ..shared.errors import ValidationError
from ..shared.keys import Keys
from ..shared.messages import WIRE_VERSION
from ..shared.shown import shown
from .secret_keys import check_key_name, key_id_of, make_key, matches

PREFIX = "pso"


class Role(enum.StrEnum):
    """What somebody may do: look; also pause, replay, cancel and set shares; also purge and manage keys."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def covers(self, needed: Role) -> bool:
        """Whether who has this role may do what needs ``needed``."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


class OperatorKey(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is kept of one key. JSON, so that people can read it; ``digest`` is base64 there."""

    version: int = WIRE_VERSION
    key_id: str
    digest: bytes
    name: str
    role: Role = Role.VIEWER
    sees_contents: bool = False
    created_at: float = 0.0


class OperatorKeys:
    """The operators' keys of one deployment."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._key = keys.operator_keys()
        self._audit = Audit(connection, keys)

    async def create(
        self, name: str, role: Role = Role.VIEWER, *, sees_contents: bool = False
    ) -> tuple[str, OperatorKey]:
        """Make a key; returns it, which nobody can read again, and what is kept of it.

        Args:
            name: whose it is; it stands in the audit.
            sees_contents: whether prompts and outputs are shown.

        Raises:
            ValidationError: name or role cannot be one.
        """
        if not check_key_name(name):
            raise ValidationError("name must say whose key it is, got an empty one")
        if role not in tuple(Role):
            raise ValidationError(f"role must be one of {', '.join(Role)}, got {shown(role)}")
        key, key_id, digest = make_key(PREFIX)
        record = OperatorKey(
            key_id=key_id,
            digest=digest,
            name=name,
            role=Role(role),
            sees_contents=sees_contents,
            created_at=time.time(),
        )
        async with self._audit.audited("operator_key.create", key_id, name=name, role=role, contents=sees_contents):
            await self._connection.execute("HSET", self._key, key_id, msgspec.json.encode(record))
        return key, record

    async def find(self, key: str) -> OperatorKey | None:
        """Return what is kept of a whole key; None if it is not valid."""
        key_id = key_id_of(PREFIX, key)
        record = None if key_id is None else await self.get(key_id)
        return record if record is not None and matches(key, record.digest) else None

    async def get(self, key_id: str) -> OperatorKey | None:
        """Return what is kept of a key; None if there is none of this id."""
        data = await self._connection.execute("HGET", self._key, check_text("key_id", key_id))
        return None if data is None else msgspec.json.decode(data, type=OperatorKey)

    async def list(self) -> list[OperatorKey]:
        """Return what is kept of all keys, the oldest first."""
        values = await self._connection.execute("HVALS", self._key)
        found = (msgspec.json.decode(value, type=OperatorKey) for value in values)
        return sorted(found, key=lambda key: key.created_at)

    async def revoke(self, key_id: str) -> bool:
        """Remove a key; returns whether there was one. Its sessions end with it."""
        async with self._audit.audited("operator_key.revoke", check_text("key_id", key_id)) as told:
            told["found"] = was_there = bool(await self._connection.execute("HDEL", self._key, key_id))
            return was_there
