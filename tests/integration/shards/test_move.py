"""A model moves under load; nothing is lost, doubled or changed, wherever the move is cut short."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from penstock.producer import Client, SamplingParams
from penstock.producer.requests import log_checks
from penstock.producer.requests.reader import DeltaReader
from penstock.shared.broker import NEW, Broker, EngineCapacity, Homes, Queue, Record
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import (
    BrokerError,
    ConfigurationError,
    RedisUnavailableError,
    UnknownModelError,
    ValidationError,
)
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.queue.lifecycle import RequestState
from penstock.shared.shards import ShardMover, make_servers
from penstock.shared.shards import move as move_module
from penstock.shared.swap.views import SleepLevel

from ..broker.snapshot import read_snapshot
from ..client.harness import DEADLINE_S, claim_one, until_followed, write
from ..conftest import LONG_MS
from .conftest import Connect, Deployment, keys_at, place, serve

Plain = dict[str, CommandConnection]
M = Keys().model("m")


@pytest.fixture
async def mover(deployment: Deployment) -> AsyncIterator[ShardMover]:
    servers = make_servers(deployment.url, deployment.shards)
    yield ShardMover(servers, Keys())
    for server in servers.values():
        await server.close()


async def test_all_that_is_known_of_a_model_moves(connect: Connect, plain: Plain, mover: ShardMover) -> None:
    await place(plain["home"], "m", "a")
    broker = Broker(connect(), M)
    queue = Queue(connect(), M)
    for number in range(move_module.MAX_ENTRIES * 2 + 7):
        assert await broker.enqueue(f"r{number}", b"payload" * 10, result_ttl_ms=60_000, tenant="t") == NEW
    ended = await claim_one(broker)
    await write(broker, ended, 0, 1, 2, end=FinishReason.STOP)
    await broker.enqueue("due", b"payload", result_ttl_ms=60_000, timeout_ms=50_000)
    await queue.configure_tenant("t", None)
    await Homes(connect(), M).renew("d0", SleepLevel.DISK, 2.0, lease_ttl_ms=LONG_MS)
    await queue.pause(put_back=True)  # so that the move changes nothing by it
    before = await read_snapshot(plain["a"], M)
    report = await mover.move("m", "b")
    assert (report.source, report.target, report.is_paused) == ("a", "b", True)
    after = await read_snapshot(plain["b"], M)
    assert await keys_at(plain["a"], "m") == set()
    assert after.kinds - {"moved_by"} == before.kinds - {"moved_by"}
    for kind in before.kinds - {"moved_by"}:
        assert after.of(kind) == before.of(kind), kind
    assert 0 < after.ttl_ms("request", ended.request_id) <= before.ttl_ms("request", ended.request_id)
    # Entries of streams that are gone do not come again.
    lane = f"{M.prefix}lane:standard:t"
    last_ids = [dict(zip(*[iter(await plain["b"].execute("XINFO", "STREAM", lane))] * 2, strict=True))]
    assert last_ids[0][b"last-generated-id"].decode() == after.of("lane")["standard:t"][-1][0]
    assert await mover.under_way() == {}
    assert [home.device for home in (await Homes(connect(), M).demand()).homes] == ["d0"]


async def test_a_key_that_expires_while_it_is_copied_is_left_out(
    plain: Plain, mover: ShardMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place(plain["home"], "m", "a")
    expiring, staying = M.request("r0"), M.request("r1")
    for key in (expiring, staying):
        await plain["a"].execute("SET", key, "v")
    is_long_stream = move_module._Move._is_long_stream

    async def expire_and_look(move: move_module._Move, name: bytes) -> bool:
        await plain["a"].execute("DEL", expiring)
        return await is_long_stream(move, name)

    monkeypatch.setattr(move_module._Move, "_is_long_stream", expire_and_look)
    await mover.move("m", "b")
    assert [await plain["b"].execute("GET", key) for key in (expiring, staying)] == [None, b"v"]


async def test_streams_follow_a_moved_model(connect: Connect, plain: Plain, client: Client, mover: ShardMover) -> None:
    """Processes that know of nothing are refused where it was, and find it."""
    await place(plain["home"], "m", "a")
    broker = await serve(connect(), "m")
    of_others = Broker(connect(), M)
    of_a_reader = Broker(connect(), M)
    for believer in (of_others, of_a_reader):
        await believer.state("nothing")  # it knows where the model is, as it believes

    async def read() -> list[int]:
        deltas = client.stream("hi", SamplingParams(), model="m")
        return [token async for delta in deltas for token in delta.token_ids]

    reading = asyncio.create_task(read())
    claim = await claim_one(broker)
    await until_followed(plain["a"], broker, claim)
    await write(broker, claim, 0, 1, 2)
    await mover.move("m", "b")
    assert [record.token_ids for record in await of_a_reader.read_log(claim.request_id)] == [[1, 2]]
    # The engine that had it is refused at the new place as well.
    late = Record(claim.request_id, claim.epoch, Delta(index=2, token_ids=[9], text="x"))
    assert await broker.append([late]) == [claim.request_id]
    again = await claim_one(of_others)
    assert (again.request_id, again.num_logged_tokens) == (claim.request_id, 2)
    assert again.epoch > claim.epoch
    await write(of_others, again, 2, 3)
    await until_followed(plain["b"], broker, claim)
    await write(of_others, again, 3, 4, end=FinishReason.STOP)
    assert await reading == [1, 2, 3, 4]
    assert await keys_at(plain["a"], "m") == set()


async def test_an_end_during_two_moves_is_delivered_after_the_return(
    connect: Connect, plain: Plain, client: Client, mover: ShardMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sends no command meanwhile, so it learns of neither move."""
    is_back, was_silent = asyncio.Event(), DeltaReader.was_silent_since_last_call
    monkeypatch.setattr(log_checks, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(
        DeltaReader, "was_silent_since_last_call", lambda reader: was_silent(reader) and is_back.is_set()
    )
    await place(plain["home"], "m", "a")
    broker = await serve(connect(), "m")
    stream = client.stream("hi", SamplingParams(), model="m")
    first = asyncio.create_task(anext(stream))
    claim = await claim_one(broker)
    await until_followed(plain["a"], broker, claim)
    await write(broker, claim, 0, 1, 2)
    assert (await first).token_ids == [1, 2]

    async def read_on() -> list[int]:
        return [token async for delta in stream for token in delta.token_ids]

    rest = asyncio.create_task(read_on())
    await mover.move("m", "b")
    again = await claim_one(broker)
    await write(broker, again, 2, 3, end=FinishReason.STOP)
    await mover.move("m", "a")
    is_back.set()
    async with asyncio.timeout(DEADLINE_S):
        assert await rest == [3]


async def test_an_enqueue_during_a_move_waits_and_is_stored_once(
    connect: Connect, plain: Plain, mover: ShardMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place(plain["home"], "m", "a")
    one, two = Broker(connect(), M), Broker(connect(), M)
    assert await one.enqueue("before", b"payload", result_ttl_ms=60_000) == NEW
    assert await two.state("before") is RequestState.QUEUED
    under_way: list[asyncio.Task[Any]] = []

    async def in_the_middle() -> None:
        under_way.append(asyncio.create_task(one.enqueue("middle", b"payload", result_ttl_ms=60_000)))
        under_way.append(asyncio.create_task(two.enqueue("middle", b"payload", result_ttl_ms=60_000)))
        under_way.append(asyncio.create_task(two.state("before")))
        await asyncio.sleep(0)

    before_step(monkeypatch, "settle", in_the_middle)
    await mover.move("m", "b")
    answers = await asyncio.gather(*under_way)
    assert sorted(answers[:2]) == [NEW, "queued"]
    assert answers[2] is RequestState.QUEUED
    claims = (await two.claim("e", EngineCapacity(max_num_seqs=9))).claims
    assert [claim.request_id for claim in claims] == ["before", "middle"]


@pytest.mark.parametrize("step", ["arrive", "depart", "write_keys"])
async def test_a_caller_redirected_too_early_waits(
    connect: Connect, plain: Plain, mover: ShardMover, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The target has never held the model."""
    await place(plain["home"], "m", "a")
    broker = Broker(connect(), M)
    await broker.enqueue("before", b"payload", result_ttl_ms=60_000)
    under_way: list[asyncio.Task[str]] = []

    async def in_the_middle() -> None:
        under_way.append(asyncio.create_task(broker.enqueue("middle", b"payload", result_ttl_ms=60_000)))
        # The source takes it until it says that the model has left; the target nothing yet.
        is_taken = step == "arrive"
        await asyncio.wait(under_way, timeout=DEADLINE_S if is_taken else 0.3)
        assert under_way[0].done() == is_taken

    after_step(monkeypatch, step, in_the_middle)
    await mover.move("m", "b")
    assert await under_way[0] == NEW
    claims = (await broker.claim("e", EngineCapacity(max_num_seqs=9))).claims
    assert [claim.request_id for claim in claims] == ["before", "middle"]


async def test_an_unfinished_move_is_reported_with_the_remedy(
    connect: Connect, plain: Plain, mover: ShardMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place(plain["home"], "m", "a")
    broker = Broker(connect(retry_for_s=0.5), M)
    await broker.enqueue("r", b"payload", result_ttl_ms=60_000)

    async def die() -> None:
        raise Killed

    before_step(monkeypatch, "settle", die)
    with pytest.raises(Killed):
        await mover.move("m", "b")
    with pytest.raises(RedisUnavailableError, match=r"model 'm' is on its way to another shard.*penstock shard move"):
        await broker.enqueue("r2", b"payload", result_ttl_ms=60_000)
    with pytest.raises(RedisUnavailableError, match="on its way"):
        await broker.state("r")
    await mover.move("m", "b")
    assert await broker.enqueue("r2", b"payload", result_ttl_ms=60_000) == NEW


@pytest.mark.parametrize("source", ["home", "a"])
async def test_waiting_for_a_move_sends_the_text_of_a_script_once(
    connect: Connect, plain: Plain, mover: ShardMover, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """The text has over 100 kB, and each waiting process asks ten times a second."""
    await place(plain["home"], "m", source)
    broker = Broker(connect(retry_for_s=1.0), M)
    await broker.enqueue("r", b"payload", result_ttl_ms=60_000)

    async def die() -> None:
        raise Killed

    before_step(monkeypatch, "settle", die)
    with pytest.raises(Killed):
        await mover.move("m", "b")
    await plain["b"].execute("CONFIG", "RESETSTAT")
    with pytest.raises(RedisUnavailableError, match="on its way"):
        await broker.enqueue("r2", b"payload", result_ttl_ms=60_000)
    stats = await plain["b"].execute("INFO", "commandstats")
    assert b"cmdstat_eval:calls=1," in stats


STEPS = ("depart", "arrive", "write_keys", "settle", "switch", "close_move")


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
async def test_a_move_that_was_cut_short_is_run_again(
    connect: Connect, plain: Plain, mover: ShardMover, monkeypatch: pytest.MonkeyPatch, step: str, is_done: bool
) -> None:
    await place(plain["home"], "m", "a")
    broker = Broker(connect(), M)
    for number in range(3):
        await broker.enqueue(f"r{number}", b"payload", result_ttl_ms=60_000)
    claim = await claim_one(broker)
    await write(broker, claim, 0, 1)

    async def die() -> None:
        raise Killed

    with monkeypatch.context() as patch:
        (after_step if is_done else before_step)(patch, step, die)
        with pytest.raises(Killed):
            await mover.move("m", "b")
    # Its place may be known by now; what is not allowed is that two serve it.
    late = Record(claim.request_id, claim.epoch, Delta(index=1, token_ids=[9], text="x"))
    own = [Broker(plain[name], M) for name in ("a", "b")]
    serving = [await serves(broker) for broker in own]
    assert sum(serving) <= 1
    if step != "close_move":
        with pytest.raises(ValidationError, match="on its way to shard 'b'; run 'penstock shard move m b'"):
            await mover.move("m", "home")
    if step != "close_move" or not is_done:
        report = await mover.move("m", "b")
        assert not report.is_paused
    assert await mover.under_way() == {}
    assert await broker.append([late]) == [claim.request_id]
    claims = (await broker.claim("e2", EngineCapacity(max_num_seqs=9))).claims
    assert [(one.request_id, one.num_logged_tokens) for one in claims] == [("r0", 1), ("r1", 0), ("r2", 0)]
    for one in claims:
        await write(broker, one, one.num_logged_tokens, 2, end=FinishReason.STOP)
    assert [record.token_ids for record in await broker.read_log("r0")] == [[1], [2]]
    assert await keys_at(plain["a"], "m") == set()


async def test_a_mover_that_slept_while_another_moved_is_refused(
    connect: Connect, deployment: Deployment, plain: Plain, mover: ShardMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mover is suspended before each of its steps, and the model returns meanwhile to its original shard."""
    for step in ("depart", "arrive", "write_keys", "settle", "switch"):
        model = f"m-{step}"
        keys = Keys().model(model)
        await place(plain["home"], model, "a")
        broker = Broker(connect(), keys)
        await broker.enqueue("r", b"payload", result_ttl_ms=60_000)
        servers = make_servers(deployment.url, deployment.shards)
        other = ShardMover(servers, Keys())

        async def meanwhile(model: str = model, other: ShardMover = other) -> None:
            await other.move(model, "b")
            await other.move(model, "a")

        with monkeypatch.context() as patch:
            before_step(patch, step, meanwhile)
            with pytest.raises(BrokerError, match="somebody else moves"):
                await mover.move(model, "b")
        assert await serves(Broker(plain["a"], keys))
        with pytest.raises(ConfigurationError, match="is on shard 'a'"):
            await Broker(plain["b"], keys).enqueue("r2", b"payload", result_ttl_ms=60_000)
        assert (await broker.claim("e", EngineCapacity(max_num_seqs=9))).claims[0].request_id == "r"
        for server in servers.values():
            await server.close()


async def test_a_mover_that_slept_deletes_nothing_where_the_model_is_by_now(
    connect: Connect, deployment: Deployment, plain: Plain, mover: ShardMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place(plain["home"], "m", "a")
    broker = Broker(connect(), M)
    await broker.enqueue("r", b"payload", result_ttl_ms=60_000)
    servers = make_servers(deployment.url, deployment.shards)

    async def meanwhile() -> None:
        await ShardMover(servers, Keys()).move("m", "b")

    before_step(monkeypatch, "write_keys", meanwhile)
    with pytest.raises(BrokerError, match="somebody else moves"):
        await mover.move("m", "b")
    assert [claim.request_id for claim in (await broker.claim("e", EngineCapacity(max_num_seqs=9))).claims] == ["r"]
    for server in servers.values():
        await server.close()


async def test_a_mover_that_slept_does_not_end_the_next_move(
    deployment: Deployment, plain: Plain, mover: ShardMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place(plain["home"], "m", "a")
    servers = make_servers(deployment.url, deployment.shards)
    other = ShardMover(servers, Keys())

    async def die() -> None:
        raise Killed

    async def meanwhile() -> None:
        await other.move("m", "b")
        with monkeypatch.context() as patch:
            before_step(patch, "depart", die)
            with pytest.raises(Killed):
                await other.move("m", "a")

    before_step(monkeypatch, "switch", meanwhile)
    with pytest.raises(BrokerError, match="somebody else moves"):
        await mover.move("m", "b")
    assert await mover.under_way() == {"m": "a"}
    await other.move("m", "a")
    for server in servers.values():
        await server.close()


async def test_models_older_than_shards_can_leave_home_and_return(
    connect: Connect, plain: Plain, mover: ShardMover
) -> None:
    old = Broker(plain["home"], M)
    await old.enqueue("r", b"payload", result_ttl_ms=60_000)
    await mover.move("m", "a")
    with pytest.raises(ConfigurationError, match="is on shard 'a'"):
        await old.enqueue("r2", b"payload", result_ttl_ms=60_000)
    broker = Broker(connect(), M)
    assert await broker.state("r") is RequestState.QUEUED
    await mover.move("m", "home")
    assert await old.enqueue("r2", b"payload", result_ttl_ms=60_000) == NEW
    assert [claim.request_id for claim in (await broker.claim("e", EngineCapacity(max_num_seqs=9))).claims] == [
        "r",
        "r2",
    ]


async def test_models_that_cannot_be_moved_are_refused(connect: Connect, plain: Plain, mover: ShardMover) -> None:
    with pytest.raises(UnknownModelError, match="'m' has no place yet"):
        await mover.move("m", "a")
    await place(plain["home"], "m", "a")
    with pytest.raises(ValidationError, match="'m' is on shard 'a' already"):
        await mover.move("m", "a")
    with pytest.raises(ValidationError, match="to must be one of the shards home, a, b, got 'c'"):
        await mover.move("m", "c")
    await Broker(connect(), M).enqueue("r", b"payload", result_ttl_ms=60_000)
    await Broker(plain["b"], M).enqueue("r", b"payload", result_ttl_ms=60_000)
    with pytest.raises(ConfigurationError, match="shard 'b' has a queue of model 'm' already"):
        await mover.move("m", "b")
    assert await mover.under_way() == {}
    assert (await mover.move("m", "home")).source == "a"


class Killed(Exception):
    """Ends a mover where a test wants it."""


async def serves(broker: Broker) -> bool:
    """Whether a server would take a request of the model. (Where it lives not, it says so.)"""
    try:
        await broker.renew_client("somebody", 1)
    except ConfigurationError:
        return False
    return bool(await broker._connection.execute("EXISTS", broker.keys.queue))


def before_step(patch: pytest.MonkeyPatch, step: str, act: Callable[[], Awaitable[None]]) -> None:
    """Have every mover act once before its script ``step`` runs for the first time."""
    _at_step(patch, step, act, is_after=False)


def after_step(patch: pytest.MonkeyPatch, step: str, act: Callable[[], Awaitable[None]]) -> None:
    _at_step(patch, step, act, is_after=True)


def _at_step(patch: pytest.MonkeyPatch, step: str, act: Callable[[], Awaitable[None]], *, is_after: bool) -> None:
    run_script, script = CommandConnection.run_script, move_module.SCRIPTS[step]
    is_due = True

    async def run(self: CommandConnection, given: Any, *args: Any, **how: bool) -> Any:
        nonlocal is_due
        if given is not script or not is_due:
            return await run_script(self, given, *args, **how)
        is_due = False
        if not is_after:
            await act()
        reply = await run_script(self, given, *args, **how)
        if is_after:
            await act()
        return reply

    patch.setattr(CommandConnection, "run_script", run)
