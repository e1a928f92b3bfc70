"""Reservations of the header ``Idempotency-Key``, in Redis: which generation a key stands for."""

from __future__ import annotations

import hashlib
import secrets
import time

import msgspec

from ...shared.connection import CommandConnection
from ...shared.keys import Keys
from ...shared.messages import WIRE_VERSION
from ...shared.values.shown import shown
from ..openai.errors import OpenAIError
from ..openai.responses.response_store import MAX_RUN_S

HEADER = "idempotency-key"
_NUM_SEED_DIGITS = 32


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """The generation that a key stands for. JSON.

    Args:
        digest: of path and body.
        seed: 32 hexadecimal digits, from which the id of the generation is made.
        created_at: Unix time of the reservation.
    """

    version: int = WIRE_VERSION
    digest: str
    seed: str
    created_at: int

    def following(self) -> Reservation:
        """Return the reservation of another generation. It is the same whoever calls this, and however often."""
        return msgspec.structs.replace(self, seed=hashlib.sha256(self.seed.encode()).hexdigest()[:_NUM_SEED_DIGITS])


def digest_of(path: str, content: str) -> str:
    """Return the digest of a path and the content of a body."""
    return hashlib.sha256(f"{path}\n{content}".encode()).hexdigest()


_decoder = msgspec.json.Decoder(Reservation)


class IdempotencyKeys:
    """Reserves generations for keys. A key belongs to a tenant.

    Args:
        result_ttl_s: how long a result is stored after its end; a key is stored for that time and ``MAX_RUN_S``.
    """

    def __init__(self, connection: CommandConnection, keys: Keys, *, result_ttl_s: float) -> None:
        self._connection = connection
        self._keys = keys
        self._ttl_ms = int((result_ttl_s + MAX_RUN_S) * 1000)

    async def reserve(self, tenant: str, key: str, digest: str) -> tuple[Reservation, bool]:
        """Return the reservation of ``key``, and whether it is new.

        Raises:
            OpenAIError: 409, the key was used for another body.
        """
        created = Reservation(digest=digest, seed=secrets.token_hex(_NUM_SEED_DIGITS // 2), created_at=int(time.time()))
        data: bytes | None = None
        while data is None:  # the key may expire between the two commands
            command = ("SET", self._name(tenant, key), msgspec.json.encode(created), "NX", "PX", self._ttl_ms)
            if await self._connection.execute(*command):
                return created, True
            data = await self._connection.execute("GET", self._name(tenant, key))
        reservation = _decoder.decode(data)
        if reservation.digest != digest:
            message = f"{HEADER} {shown(key)} was used for another body; send a new key with a new body"
            raise OpenAIError(409, message, param=HEADER, code="idempotency_key_reused")
        return reservation, False

    async def replace(self, tenant: str, key: str, reservation: Reservation) -> Reservation:
        """Return the next reservation of ``key``, after the generation of ``reservation`` ended without an answer."""
        following = reservation.following()
        encoded = msgspec.json.encode(following)
        await self._connection.execute("SET", self._name(tenant, key), encoded, "PX", self._ttl_ms)
        return following

    def _name(self, tenant: str, key: str) -> str:
        return self._keys.idempotency(tenant, hashlib.sha256(key.encode()).hexdigest())
