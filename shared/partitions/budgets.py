"""Budgets of a deployment: their records at home, and the amounts spent over all models and partitions.

Each partition refuses by itself: it knows the budgets and its own amount. ``sync_budgets``, which supervisors call
every second, writes the amount of the others there. So a budget that several models share may be exceeded by what
starts within that second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from uuid import uuid4

import msgspec

from ..broker.script import run_script
from ..connection import CommandConnection
from ..deployment.records import decode_records
from ..keys import Keys, ModelKeys
from ..queue.budgets import Budget, BudgetState
from .layout import Layout, read_layouts

SYNC_EVERY_MS = 700
# After the last budget was removed, in case a late process has written it to a partition again.
SYNC_WITHOUT_BUDGETS_MS = 60_000
# Field of the records that changes with each of them.
_VERSION = ""
_encoder = msgspec.msgpack.Encoder()
# Name, start of its period, and the amount spent in one partition since.
_Spent = dict[str, tuple[int, float]]


class BudgetStore:
    """The records of all budgets of a deployment."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._key = keys.budgets()

    async def read_all(self) -> list[Budget]:
        """Return all budgets, sorted by tenant, key and period."""
        flat = await self._connection.execute("HGETALL", self._key)
        pairs = [(name.decode(), value) for name, value in zip(flat[::2], flat[1::2], strict=True) if name]
        return sorted(decode_records("budget", pairs, Budget), key=lambda budget: budget.name)

    async def set_budget(self, budget: Budget) -> None:
        """Set a budget, in place of the former one of its tenant, key and period.

        Raises:
            ValidationError: a value is invalid.
        """
        fields = (budget.validated().name, msgspec.json.encode(budget))
        await self._connection.execute("HSET", self._key, _VERSION, uuid4().hex, *fields)

    async def remove_budget(self, name: str) -> bool:
        """Remove a budget. Returns whether it existed."""
        await self._connection.execute("HSET", self._key, _VERSION, uuid4().hex)
        return bool(await self._connection.execute("HDEL", self._key, name))


async def ledger_models(connection: CommandConnection, keys: Keys) -> list[str]:
    """Return the names of all models that may have a ledger, also forgotten ones."""
    commands = ("HKEYS", keys.models()), ("HKEYS", keys.awaited_models()), ("SMEMBERS", keys.forgotten_models())
    lists = await asyncio.gather(*(connection.execute(*command) for command in commands))
    return sorted({name.decode() for names in lists for name in names})


async def sync_budgets(connection: CommandConnection, keys: Keys) -> list[BudgetState]:
    """Bring the budgets of all partitions up to date, and return their state.

    Raises: as the call of a partition, after the others have ended.
    """
    budgets = await BudgetStore(connection, keys).read_all()
    layouts = await read_layouts(connection, keys)
    parts = [
        (model, keys.model(model, number))
        for model in await ledger_models(connection, keys)
        for number in range(layouts.get(model, Layout()).num_ever)
    ]
    spent = await _of_each(connection, parts, budgets, [{} for _ in parts])
    if len(parts) > 1:
        await _of_each(connection, parts, budgets, [_without(number, spent) for number in range(len(parts))])
    return [_budget_state(budget, spent) for budget in budgets]


async def sync_if_due(connection: CommandConnection, keys: Keys) -> None:
    """Call ``sync_budgets`` unless all partitions know that there is no budget, or another process has just done it.

    A version is read before the budgets, so that one which is set meanwhile has another.
    """
    version, num_fields = await asyncio.gather(
        connection.execute("HGET", keys.budgets(), _VERSION), connection.execute("HLEN", keys.budgets())
    )
    is_empty = num_fields == (version is not None)
    if is_empty and (version is None or version == await connection.execute("GET", keys.budgets_ended())):
        return
    if await connection.execute("SET", keys.budgets_synced(), "1", "NX", "PX", SYNC_EVERY_MS):
        states = await sync_budgets(connection, keys)
        if version is not None and not states:
            await connection.execute("SET", keys.budgets_ended(), version, "PX", SYNC_WITHOUT_BUDGETS_MS)


async def _of_each(
    connection: CommandConnection,
    parts: Sequence[tuple[str, ModelKeys]],
    budgets: Sequence[Budget],
    elsewhere: Sequence[_Spent],
) -> list[_Spent]:
    async def sync(part: tuple[str, ModelKeys], known: _Spent) -> _Spent:
        model, keys = part
        entries = [(budget.name, budget.definition(model), *known.get(budget.name, ("", ""))) for budget in budgets]
        rows = await run_script(connection, keys, "sync_budgets", [keys.leases], [_encoder.encode(entries)])
        return {name.decode(): (int(start), float(amount)) for name, start, amount in rows}

    results = await asyncio.gather(*map(sync, parts, elsewhere), return_exceptions=True)
    spent: list[_Spent] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        spent.append(result)
    return spent


def _without(number: int, spent: Sequence[_Spent]) -> _Spent:
    """Return the amounts of all partitions but one, for budgets whose periods agree."""
    return {
        name: (start, sum(other[name][1] for place, other in enumerate(spent) if place != number))
        for name, (start, _) in spent[number].items()
        if all(other.get(name, (None, 0.0))[0] == start for other in spent)
    }


def _budget_state(budget: Budget, spent: Sequence[_Spent]) -> BudgetState:
    of_parts = [part[budget.name] for part in spent]
    start, end = budget.period.bounds(max((start for start, _ in of_parts), default=0) or time.time())
    amount = sum(amount for part_start, amount in of_parts if part_start == start)
    return BudgetState(budget=budget, spent=amount, start=start, renewed_at=end)
