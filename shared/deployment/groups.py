"""The engines of a data-parallel group: they join its generations, and the ranks of an ended one are fenced.

A group is a name that engines of one model share. A *generation* of it is one set of ranks that compute together, from
their rendezvous until one of them leaves. Redis numbers generations, assigns ranks, and refuses those of an earlier
generation; no process leads. The next generation consists of the engines that come first
(ops/decisions/data_parallel.md).
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from ..connection import CommandConnection
from ..errors import GroupSizeError
from ..keys import ModelKeys
from ..redis_access.script import Script, load_scripts
from ..values.shown import shown

# A standby engine renews its place each second.
STANDBY_MS = 5_000
# How late a serving rank may be before a newcomer counts it as gone: its supervisor ends it sooner.
PATIENCE_MS = 15_000
SCRIPTS: dict[str, Script] = load_scripts(__name__.rpartition(".")[0], ("join", "renew", "finish", "resize"))


class Standing(enum.StrEnum):
    """State of a rank's generation, as of a renewal."""

    OK = "ok"
    LEAVE = "leave"
    OVER = "over"
    STALE = "stale"


class Place(msgspec.Struct, frozen=True):
    """A rank of a generation; ``size`` is the number of ranks when it is full."""

    generation: int
    rank: int
    size: int


class Renewal(msgspec.Struct, frozen=True):
    """Result of a renewal: ranks that have joined, the group's size, and the first rank's address ("" if unknown)."""

    standing: Standing
    count: int
    size: int
    address: str

    @property
    def is_full(self) -> bool:
        """Whether all ranks have joined, and their address is known."""
        return self.standing is Standing.OK and self.count == self.size and bool(self.address)


class Membership:
    """Membership of an engine in a group.

    All methods raise ``RedisUnavailableError`` when Redis is unavailable for longer than the connection retries. Each
    may run twice.

    Args:
        ttl_ms: a rank without a renewal for this long has left.
    """

    def __init__(
        self, connection: CommandConnection, keys: ModelKeys, group: str, engine_id: str, *, ttl_ms: int
    ) -> None:
        self._connection = connection
        self._key = keys.group(group)
        self._engine_id = engine_id
        self._ttl_ms = ttl_ms

    async def join(self, size: int) -> Place | None:
        """Take a rank of the current generation, or of a new one; None if live engines have all ranks.

        Args:
            size: size of a group that has none yet, or that all ranks have left.
        """
        args = [self._engine_id, size, self._ttl_ms, STANDBY_MS, PATIENCE_MS]
        status, generation, rank, size = await self._run_group_script("join", args)
        return Place(int(generation), rank, size) if status == b"joined" else None

    async def renew(self, place: Place, *, address: str = "", serves: bool = False, num_experts: int = 0) -> Renewal:
        """Renew this rank.

        Args:
            address: rendezvous address of the ranks, if this is the first one.
            serves: its model is loaded.
            num_experts: number of experts of the model, once it serves.
        """
        args = [self._engine_id, place.generation, place.rank, self._ttl_ms, address, int(serves), num_experts]
        standing, count, size, address_ = await self._run_group_script("renew", args)
        return Renewal(Standing(standing.decode()), count, size, address_.decode())

    async def finish(self, place: Place) -> bool:
        """End a generation. False if a later one has begun."""
        return bool(await self._run_group_script("finish", [place.generation]))

    async def _run_group_script(self, name: str, args: list[Any]) -> Any:
        return await self._connection.run_script(SCRIPTS[name], [self._key], args)


async def resize_group(connection: CommandConnection, keys: ModelKeys, group: str, size: int) -> None:
    """Begin the next generation of a group with another number of ranks; its requests are requeued meanwhile.

    Raises:
        GroupSizeError: the group does not exist, has fewer engines, or the size does not divide the model's experts.
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
