"""Keys of the people who operate a deployment. A key has a name, a role, and the right to see contents of requests."""

from __future__ import annotations

import enum
import time

from ..shared.connection import CommandConnection
from ..shared.errors import ValidationError
from ..shared.keys import Keys
from ..shared.values.shown import shown
from .secret_keys import KeyStore, SecretKey, check_key_name, key_id_of, make_key, matches

PREFIX = "pso"


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
        key, key_id, digest = make_key(PREFIX)
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
        key_id = key_id_of(PREFIX, key)
        record = None if key_id is None else await self.get(key_id)
        return record if record is not None and matches(key, record.digest) else None
