"""Keys of the people who run a deployment: a name, a role, and whether they may see what requests say."""

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
    """What somebody may do: look; also pause, replay, cancel and set shares; also purge and manage keys."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def covers(self, needed: Role) -> bool:
        """Whether who has this role may do what needs ``needed``."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


class OperatorKey(SecretKey, kw_only=True, omit_defaults=True):
    """What is kept of one key, and of whose it is."""

    name: str
    role: Role = Role.VIEWER
    sees_contents: bool = False


class OperatorKeys(KeyStore[OperatorKey]):
    """The operators' keys of one deployment. The sessions of one that is revoked end with it."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        super().__init__(connection, keys, keys.operator_keys(), OperatorKey, "operator_key")

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
        await self._keep(record, name=name, role=role, contents=sees_contents)
        return key, record

    async def find(self, key: str) -> OperatorKey | None:
        """Return what is kept of a whole key; None if it is not valid."""
        key_id = key_id_of(PREFIX, key)
        record = None if key_id is None else await self.get(key_id)
        return record if record is not None and matches(key, record.digest) else None
