"""What a real server says of who wrote what, also where a script lets somebody write who must not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.ops.lab.chaos.owner_watch import OwnerWatch
from penstock.ops.lab.chaos.owners import Owners
from penstock.shared.broker import SCRIPTS, Broker, EngineCapacity, FinalRecord, Record
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.redis_access.script import script_of


@pytest.fixture
def broker(commands: CommandConnection, namespace: str) -> Broker:
    return Broker(commands, Keys(namespace).model("m"))


@pytest.fixture
async def watch(broker: Broker, redis_url: str, commands: CommandConnection) -> AsyncIterator[OwnerWatch]:
    """Watch the scripts as they are when the test begins."""
    watch = OwnerWatch(redis_url, broker.keys, Owners())
    running = asyncio.create_task(watch.run())
    await watch.catch_up(commands)
    yield watch
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def enqueue(broker: Broker, request_id: str) -> None:
    await broker.enqueue(request_id, b"p", result_ttl_ms=60_000)


async def claim(broker: Broker, engine: str) -> int:
    """Returns the epoch."""
    (found,) = (await broker.claim(engine, EngineCapacity(max_num_seqs=1))).claims
    return found.epoch


def record(epoch: int, index: int, num_tokens: int) -> Record:
    return Record("a", epoch, Delta(index=index, token_ids=[7] * num_tokens))


async def test_owners_that_follow_each_other(broker: Broker, watch: OwnerWatch, commands: CommandConnection) -> None:
    await enqueue(broker, "a")
    first = await claim(broker, "A")
    for _ in range(2):  # a call that is sent again writes nothing
        assert await broker.append([record(first, 0, 2)]) == []
    assert await broker.release([("a", first)]) == 1
    second = await claim(broker, "B")
    assert await broker.append([record(first, 2, 1)]) == ["a"]
    end = Delta(index=2, token_ids=[7], finish_reason=FinishReason.STOP)
    assert await broker.finish([FinalRecord("a", second, end)]) == []
    await watch.catch_up(commands)
    assert (watch.owners.harms, watch.owners.num_records, watch.owners.num_moved) == ([], 2, 1)


@pytest.fixture
def accepts_any_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An append that does not ask whose the request is."""
    script = SCRIPTS["append"]
    text = script.text.replace("epoch ~= ARGV[i + 1] or state ~= 'claimed'", "not state")
    assert text != script.text
    monkeypatch.setitem(SCRIPTS, "append", script_of("append", text))


@pytest.mark.usefixtures("accepts_any_epoch")
async def test_an_accepted_write_of_a_stale_owner_is_detected(
    broker: Broker, redis_url: str, watch: OwnerWatch, commands: CommandConnection
) -> None:
    """Covers a connection that was cut in between."""
    await enqueue(broker, "a")
    first = await claim(broker, "A")
    assert await broker.release([("a", first)]) == 1
    second = await claim(broker, "B")
    assert await broker.append([record(second, 0, 3)]) == []
    await watch.catch_up(commands)
    watch.is_watching.clear()
    monitors = [line for line in (await commands.execute("CLIENT", "LIST")).splitlines() if b"cmd=monitor" in line]
    for line in monitors:
        await commands.execute("CLIENT", "KILL", "ID", line.split()[0].removeprefix(b"id="))
    await watch.catch_up(commands)
    assert await broker.append([record(first, 3, 1)]) == []
    await watch.catch_up(commands)
    assert watch.owners.harms == [
        f"a: token 3 was written by A (epoch {first}) after the request had gone to B (epoch {second})"
    ]


async def test_data_loss_clears_the_known_owners(
    broker: Broker, watch: OwnerWatch, commands: CommandConnection
) -> None:
    await enqueue(broker, "a")
    first = await claim(broker, "A")
    assert await broker.append([record(first, 0, 2)]) == []
    await watch.catch_up(commands)
    watch.saw(b'1700000000.000001 [0 127.0.0.1:1] "FLUSHALL"')
    # The server of this test is not only ours, so the request goes as all would.
    await commands.execute(
        "DEL", *(f"{broker.keys.prefix}{kind}:a" for kind in ("request", "log")), broker.keys.claims("A")
    )
    await enqueue(broker, "a")
    second = await claim(broker, "B")
    assert await broker.append([record(second, 0, 2)]) == []
    await watch.catch_up(commands)
    assert (watch.owners.harms, watch.owners.num_records) == ([], 2)
