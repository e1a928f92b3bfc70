"""The number of a model's partitions, the partition of each request, and the order in which an engine serves them.

A tenant's requests go to one partition, by a rendezvous hash of its name: more partitions take their part of the
tenants, fewer give theirs away, and no other moves. Tenants that are spread go to all, by the ids of their sessions,
else of their requests.

Source: Thaler and Ravishankar 1998, "Using name-based mappings to increase hit rates" (rendezvous hashing).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from functools import lru_cache

import msgspec

from ..broker import Broker
from ..connection import CommandConnection
from ..deployment.records import note_unreadable
from ..errors import ConfigurationError, RedisUnavailableError
from ..keys import Keys
from ..values.shown import shown

MAX_PARTITIONS = 64
# Nobody looks for requests by a layout that is older; a new one is used from so much later on.
MAX_AGE_S = 5.0
# Home is unavailable: use the last layout, which cannot change meanwhile.
PATIENCE_S = 1.0
# Steps by it fall evenly, however many there are.
_GOLDEN = 0.6180339887498949


class Layout(msgspec.Struct, frozen=True):
    """The partitions of a model.

    Args:
        version: the microseconds of home's clock at the change, and higher than that before; 0 for a model that has
            never had more than one.
        num: number of partitions.
        num_before: how many there were before; whoever had another partition then has it until nothing waits there. If
            they were more, those that go away are served and looked into until nothing is left in them.
        spread: tenants whose requests go to all.
        is_settled: whether all partitions should have it by now; one that does not has lost its data.
        most: max number of partitions so far, whose counts are still read.
    """

    version: int = 0
    num: int = 1
    num_before: int = 1
    spread: tuple[str, ...] = ()
    is_settled: bool = False
    most: int = 1

    @property
    def num_known(self) -> int:
        """Number of partitions that may hold requests."""
        return max(self.num, self.num_before)

    @property
    def num_ever(self) -> int:
        """Number of partitions that may ever have held some."""
        return max(self.num_known, self.most)

    def partition_of(self, tenant: str, named: str) -> int:
        """Return the partition of a request, which a tenant that is spread has by its id or that of its session."""
        return choose_partition(named if tenant in self.spread else tenant, self.num)

    def former_partition_of(self, tenant: str) -> int | None:
        """Return the partition that the tenant had before, if that was another one."""
        if self.num_before == self.num or tenant in self.spread:
            return None
        former = choose_partition(tenant, self.num_before)
        return None if former == choose_partition(tenant, self.num) else former


@lru_cache(maxsize=1 << 16)
def choose_partition(name: str, num: int) -> int:
    """Return the partition of a tenant, or of a request of one that is spread."""
    if num == 1:
        return 0
    return max(range(num), key=lambda number: hashlib.sha256(f"{number}\0{name}".encode()).digest())


class Layouts:
    """Layouts of models as this process last read them from home."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._known: dict[str, tuple[Layout, float]] = {}

    async def get(self, model: str) -> Layout:
        """Return the layout of a model, which may be old: the server refuses enqueues by an old one."""
        cached = self._known.get(model)
        return await self.read(model) if cached is None else cached[0]

    async def recent(self, model: str) -> Layout:
        """Return a layout of a model that is recent enough to find every request."""
        cached = self._known.get(model)
        if cached is None:
            return await self.read(model)
        if time.monotonic() - cached[1] > MAX_AGE_S:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    return await self.read(model)
            except (TimeoutError, RedisUnavailableError):
                self._known[model] = (cached[0], time.monotonic())
        return cached[0]

    async def read(self, model: str) -> Layout:
        """Read the layout from home."""
        # Before it is asked: that is how old the answer may be.
        asked_at = time.monotonic()
        data = await self._connection.execute("HGET", self._keys.layouts(), model)
        layout = Layout() if data is None else decode_layout(model, data)
        self._known[model] = (layout, asked_at)
        return layout


async def lay_out(connection: CommandConnection, keys: Keys, model: str, layout: Layout) -> None:
    """Set the layout of all partitions, the new ones first; each then refuses an older one."""
    for number in reversed(range(layout.num_known)):
        await Broker(connection, keys.model(model, number), number).lay_out(layout.version)


async def read_layouts(connection: CommandConnection, keys: Keys) -> dict[str, Layout]:
    """Return the layouts of all models with one, from home; unreadable ones are left out."""
    flat = await connection.execute("HGETALL", keys.layouts())
    layouts: dict[str, Layout] = {}
    for name, data in zip(flat[::2], flat[1::2], strict=True):
        try:
            layouts[name.decode()] = decode_layout(name.decode(), data)
        except ConfigurationError as error:
            note_unreadable("partitions of model", name.decode(), error)
    return layouts


def decode_layout(model: str, data: bytes) -> Layout:
    """Return a layout. Raises ``ConfigurationError`` for other data."""
    try:
        return msgspec.json.decode(data, type=Layout)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"the partitions of model {shown(model)} cannot be read: {error}") from error


def home_order(rank: int, num_engines: int, num_partitions: int, turn: int) -> list[int]:
    """Return the homes of an engine in the order in which its claim number ``turn`` tries them.

    Partitions lie in a row, and each engine has a part of it that is as long as that of any other, the ``rank``-th. So
    each partition has as much of the engines' time, however few they are, and if one dies the others move up. An engine
    with parts of several begins with each as often as its part is long.
    """
    low, high = rank * num_partitions / num_engines, (rank + 1) * num_partitions / num_engines
    homes = [*range(int(low), min(num_partitions, math.ceil(high)))]
    place = homes.index(min(homes[-1], int(low + (turn * _GOLDEN % 1.0) * (high - low))))
    return homes[place:] + homes[:place]
