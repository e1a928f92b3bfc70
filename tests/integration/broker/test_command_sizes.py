"""No command has more arguments than servers that others run for you take."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.broker import Broker, Entry, FinalRecord, Record
from penstock.shared.connection import CommandConnection
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.redis_access.link import in_parts

from .conftest import take

MAX_ARGUMENTS = 3_999
NUM_REQUESTS = 2_100


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Arguments of each command that was sent."""
    sizes: list[int] = []
    execute = CommandConnection.execute

    async def counting(self: CommandConnection, *args: Any, **options: Any) -> Any:
        sizes.append(len(args))
        return await execute(self, *args, **options)

    monkeypatch.setattr(CommandConnection, "execute", counting)
    return sizes


async def test_calls_with_many_requests_are_split_into_commands_of_bounded_size(
    broker: Broker, sizes: list[int]
) -> None:
    ids = [f"r{number}" for number in range(NUM_REQUESTS)]
    await broker.enqueue_many([Entry(request_id=name, payload=b"p", result_ttl_ms=60_000) for name in ids])
    claims = await take(broker, "e0", NUM_REQUESTS)
    held = [(claim.request_id, claim.epoch) for claim in claims]
    gone = [("r0", 1), (ids[-1], 1)]
    assert await broker.renew("e0", [*held, *gone]) == ["r0", ids[-1]]
    first = [Record(name, epoch, Delta(index=0, token_ids=[7])) for name, epoch in held]
    assert await broker.append([*first, Record("r0", 1, first[0].delta)]) == ["r0"]
    assert await broker.release(held[:2000]) == 2000
    assert len(await take(broker, "e0", NUM_REQUESTS, num_held=100)) == 2000
    held = await broker.claims("e0")
    ends = [FinalRecord(name, epoch, Delta(index=1, finish_reason=FinishReason.STOP)) for name, epoch in held]
    assert await broker.finish(ends) == []
    assert await broker.count_known(ids * 2) == 2 * NUM_REQUESTS
    assert await broker.shorten(ids * 2, 1000) == NUM_REQUESTS
    assert len(sizes) > 15  # of ten calls
    assert max(sizes) <= MAX_ARGUMENTS


def test_parts_hold_all_items_in_order() -> None:
    items = list(range(10_000))
    parts = [*in_parts(items, 2)]
    assert [item for part in parts for item in part] == items
    assert max(map(len, parts)) * 2 <= MAX_ARGUMENTS - 50
    assert [*in_parts([])] == []
