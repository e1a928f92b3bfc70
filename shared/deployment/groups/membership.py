"""Joins engines to the generations of a group, and fences the ranks of a generation that is over.

A group is what engines of one model call by one name. A *generation* of it is one set of ranks that compute together,
from their rendezvous until one of them is gone. Redis numbers generations, gives out ranks, and refuses those of an
earlier one; nobody leads. The engines of the next one are whoever comes first.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from ...connection import CommandConnection
from ...keys import ModelKeys
from ...redis_access.script import Script, load_scripts
from ...values.shown import shown
from .errors import GroupSizeError

# An engine that stands by for a place says so each second.
STANDBY_MS = 5_000
# By how much a rank that serves may be late before a newcomer takes it for gone: its supervisor ends it sooner.
PATIENCE_MS = 15_000


SCRIPTS: dict[str, Script] = load_scripts(__name__.rpartition(".")[0], ("join", "renew", "finish", "resize"))


class Standing(enum.StrEnum):
    """How a rank's generation is, as it is told at a renewal."""

    OK = "ok"
    LEAVE = "leave"
    OVER = "over"
    STALE = "stale"


class Place(msgspec.Struct, frozen=True):
    """A rank of a generation; ``size`` is how many it has when it is full."""

    generation: int
    rank: int
    size: int


class Renewal(msgspec.Struct, frozen=True):
    """What a rank is told: how many have joined, of how many, and where the first rank is to be met ("" not yet)."""

    standing: Standing
    count: int
    size: int
    address: str

    @property
    def is_full(self) -> bool:
        """Whether all ranks are known, and where they meet."""
        return self.standing is Standing.OK and self.count == self.size and bool(self.address)


class Membership:
    """One engine's dealings with one group.

    All methods raise ``RedisUnavailableError`` when Redis stays away for longer than the connection retries. Each may
    run twice.

    Args:
        ttl_ms: a rank that has not been heard of for so long is gone.
    """

    def __init__(
        self, connection: CommandConnection, keys: ModelKeys, group: str, engine_id: str, *, ttl_ms: int
    ) -> None:
        self._connection = connection
        self._key = keys.group(group)
        self._engine_id = engine_id
        self._ttl_ms = ttl_ms

    async def join(self, size: int) -> Place | None:
        """Take a rank of the present generation, or of a new one; None where all are taken by engines that live.

        Args:
            size: of a group that has had no other yet, or was left by all.
        """
        args = [self._engine_id, size, self._ttl_ms, STANDBY_MS, PATIENCE_MS]
        status, generation, rank, size = await self._run("join", args)
        return Place(int(generation), rank, size) if status == b"joined" else None

    async def renew(self, place: Place, *, address: str = "", serves: bool = False, num_experts: int = 0) -> Renewal:
        """Say that this rank lives.

        Args:
            address: where the ranks are to meet, if this is the first.
            serves: its model is loaded.
            num_experts: of the model, once it serves.
        """
        args = [self._engine_id, place.generation, place.rank, self._ttl_ms, address, int(serves), num_experts]
        standing, count, size, address_ = await self._run("renew", args)
        return Renewal(Standing(standing.decode()), count, size, address_.decode())

    async def finish(self, place: Place) -> bool:
        """Say that a generation is over; False where a later one has begun."""
        return bool(await self._run("finish", [place.generation]))

    async def _run(self, name: str, args: list[Any]) -> Any:
        return await self._connection.run_script(SCRIPTS[name], [self._key], args)


async def resize_group(connection: CommandConnection, keys: ModelKeys, group: str, size: int) -> None:
    """Have the next generation of a group begin now, with that many ranks; its requests are handed back meanwhile.

    Raises:
        GroupSizeError: there is no such group, there are fewer engines, or the model's experts cannot be divided so.
    """
    status, number = await connection.run_script(SCRIPTS["resize"], [keys.group(group)], [size, STANDBY_MS])
    if status == b"absent":
        raise GroupSizeError(f"model {shown(keys.name)} has no group {shown(group)}; worker list shows groups")
    if status == b"few":
        raise GroupSizeError(
            f"new_data_parallel_size {size}: group {shown(group)} has {number} engines, those that stand by included; "
            "start more of them first, with the same --data-parallel-group"
        )
    if status == b"experts":
        raise GroupSizeError(
            f"new_data_parallel_size {size} does not divide the {number} experts of {shown(keys.name)}, of which "
            "each rank holds as many"
        )
