"""Changes the number of a model's partitions while requests wait and run.

Home is told first, and nobody goes by it yet: each partition refuses who has another layout than its own. After
``MAX_AGE_S`` whoever looks for a request knows the new partitions, and engines serve them. Then one partition after the
other changes over. A tenant that has another partition from then on keeps its former one until nothing of it waits
there: the script that enqueues there knows (``enqueue.lua``), so order holds and nothing is moved.

Those that go away are served, and looked into, as before: tenants leave them in the same way. When nothing is left in
them, no result and nothing that is parked, whoever runs the command again has them forgotten.

A change that was cut short leaves those that it had not reached refusing who knows the new layout. Whoever runs the
command again takes it up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from ..broker import Broker, Queue
from ..connection import CommandConnection
from ..errors import ValidationError
from ..keys import Keys
from ..values.names import check_name, is_partition_name, partition_name
from ..values.shown import shown
from .layout import MAX_AGE_S, MAX_PARTITIONS, Layout, Layouts, choose_partition, lay_out

MAX_NAMED = 5
SCAN_COUNT = 1000


async def change_partitions(
    connection: CommandConnection, keys: Keys, model: str, num: int, spread: Sequence[str] | None = None
) -> Layout:
    """Give a model ``num`` partitions, and say which tenants go to all of them; None: as before. Doing it twice does
    nothing. Returns the layout when all go by it.

    Raises:
        ValidationError: ``num`` is not in [1, 64], or the last change is not over yet.
    """
    if is_partition_name(model):
        raise ValidationError(f"model must be that of all partitions, got {shown(model)}")
    layouts = Layouts(connection, keys)
    old = await layouts.read(model)
    if isinstance(num, bool) or not isinstance(num, int) or not 1 <= num <= MAX_PARTITIONS:
        raise ValidationError(f"partitions must be a number in [1, {MAX_PARTITIONS}], got {shown(num)}")
    tenants = old.spread if spread is None else tuple(sorted({check_name("spread", tenant) for tenant in spread}))
    is_other = (num, tenants) != (old.num, old.spread)
    staying = await _staying(connection, keys, model, old) if old.num_before != old.num else []
    if is_other and staying:
        raise ValidationError(
            f"{len(staying)} tenants of model {shown(model)} still have requests in the partition that they had before "
            f"the last change ({', '.join(staying[:MAX_NAMED])}{', …' if len(staying) > MAX_NAMED else ''}); change "
            "the partitions when those are done"
        )
    has_leftovers = not staying and await _has_leftovers(connection, keys, model, old)
    if is_other and has_leftovers:
        raise _leftovers_error(model, old)
    new = old
    if is_other or (old.num_before != old.num and not staying and not has_leftovers):
        seconds, micros = await connection.execute("TIME")
        version = max(old.version + 1, int(seconds) * 1_000_000 + int(micros))
        if await _take_away(connection, keys, model, old, version):
            new = Layout(version=version, num=num, num_before=old.num, spread=tenants, most=max(old.num_ever, num))
        else:
            new = msgspec.structs.replace(old, version=version, is_settled=False)
        await _copy_policies(connection, keys, model, new)
        await _record_layout(connection, keys, model, new)
    if not new.version:
        return new
    if not new.is_settled:
        await asyncio.sleep(MAX_AGE_S)
    await lay_out(connection, keys, model, new)
    settled = msgspec.structs.replace(new, is_settled=True)
    await _record_layout(connection, keys, model, settled)
    if (settled.num, settled.spread) != (num, tenants):
        raise _leftovers_error(model, old)
    return settled


def _leftovers_error(model: str, layout: Layout) -> ValidationError:
    return ValidationError(
        f"the partitions of model {shown(model)} that go away, from {partition_name(model, layout.num)} on, still have "
        "requests, results or parked ones; change the partitions when those have expired or are purged"
    )


async def _record_layout(connection: CommandConnection, keys: Keys, model: str, layout: Layout) -> None:
    await connection.execute("HSET", keys.layouts(), model, msgspec.json.encode(layout))


async def _staying(connection: CommandConnection, keys: Keys, model: str, layout: Layout) -> list[str]:
    """Return the tenants with requests in a partition that is no longer theirs."""
    tenants: set[str] = set()
    for number in range(layout.num_before):
        for tenant in await Queue(connection, keys.model(model, number)).tenants():
            if tenant not in layout.spread and choose_partition(tenant, layout.num) != number:
                tenants.add(tenant)
    return sorted(tenants)


async def _take_away(connection: CommandConnection, keys: Keys, model: str, layout: Layout, version: int) -> bool:
    """Make removed partitions refuse all requests, and return whether none arrived there before."""
    for number in range(layout.num, layout.num_before):
        await Broker(connection, keys.model(model, number), number).lay_out(version)
    return not await _has_leftovers(connection, keys, model, layout)


async def _has_leftovers(connection: CommandConnection, keys: Keys, model: str, layout: Layout) -> bool:
    """Whether a removed partition has any request."""
    for number in range(layout.num, layout.num_before):
        own = keys.model(model, number)
        await Queue(connection, own).is_paused()  # so that the shard of the partition is recorded
        link = connection.link_to(own.leases)
        for pattern in own.patterns_of_requests:
            cursor = b"0"
            while True:
                cursor, names = await link.execute("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)
                if names:
                    return True
                if cursor == b"0":
                    break
    return False


async def _copy_policies(connection: CommandConnection, keys: Keys, model: str, layout: Layout) -> None:
    """Copy the policies of the first partition to the new ones."""
    first = Queue(connection, keys.model(model))
    policy, tenants = await asyncio.gather(first.policy(), first.tenant_policies())
    is_paused = await first.is_paused()
    for number in range(layout.num_before, layout.num):
        part = Queue(connection, keys.model(model, number))
        await part.configure(policy)
        for tenant, own in tenants.items():
            await part.configure_tenant(tenant, own)
        if is_paused:
            await part.pause(put_back=False)
