"""Models live on shards, all else at home; whoever looks in the wrong place is refused by the server there."""

from __future__ import annotations

import asyncio

import pytest

from penstock.producer import Client, SamplingParams
from penstock.producer.background.agenda import Agenda
from penstock.producer.webhooks import outbox as outbox_module
from penstock.producer.webhooks.event_store import EventStore
from penstock.producer.webhooks.outbox import Outbox
from penstock.shared.broker import NEW, Broker, EngineCapacity, Queue
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import ConfigurationError
from penstock.shared.keys import Keys
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.queue.lifecycle import RequestState
from penstock.shared.shards.placements import choose_shard, recorded_places
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.supervisor.reaper import Reaper

from ..client.harness import claim_one, token_indexes, until, until_followed, write
from .conftest import Connect, Deployment, keys_at, place, serve

LEASE_TTL_MS = 300

Plain = dict[str, CommandConnection]


async def answer(broker: Broker, *tokens: int) -> None:
    claim = await claim_one(broker)
    await write(broker, claim, 0, tokens[0])
    await write(broker, claim, 1, *tokens[1:], end=FinishReason.STOP)


async def test_streams_of_models_on_all_servers(connect: Connect, plain: Plain, client: Client) -> None:
    commands = connect()
    for name in ("home", "a", "b"):
        await place(plain["home"], f"on-{name}", name)
        broker = await serve(commands, f"on-{name}")
        answering = asyncio.create_task(answer(broker, 5, 6, 7))
        deltas = [delta async for delta in client.stream("hi", SamplingParams(), model=f"on-{name}")]
        await answering
        assert token_indexes(deltas) == [0, 1, 2]
        assert [token for delta in deltas for token in delta.token_ids] == [5, 6, 7]
    for name, connection in plain.items():
        for other in plain:
            assert bool(await keys_at(connection, f"on-{other}")) == (name == other)
        # What belongs to no model is at home.
        assert bool(await connection.execute("EXISTS", Keys().models())) == (name == "home")


async def test_a_new_model_gets_a_shard_and_keeps_it(connect: Connect, deployment: Deployment, plain: Plain) -> None:
    models = [f"m{number}" for number in range(20)]
    few = connect({"a": deployment.shards["a"]})
    for model in models[:10]:
        await Broker(few, Keys().model(model)).enqueue("r", b"payload", result_ttl_ms=1000)
    all_of_them = connect()
    for model in models:
        assert await Broker(all_of_them, Keys().model(model)).enqueue("r2", b"payload", result_ttl_ms=1000) == NEW
    # A shard that came later has part of what came later still, and nothing has moved.
    found = await recorded_places(plain["home"], Keys())
    assert [found[model] for model in models[:10]] == ["a"] * 10
    assert {found[model] for model in models[10:]} == {"a", "b"}
    for model in models[:10]:
        wave = await Broker(all_of_them, Keys().model(model)).claim("e", EngineCapacity(max_num_seqs=9))
        assert [claim.request_id for claim in wave.claims] == ["r", "r2"]
    assert not any([await keys_at(plain["home"], model) for model in models])


def test_one_more_shard_takes_models_from_the_others_only() -> None:
    models = [f"model-{number}" for number in range(300)]
    before = {model: choose_shard(model, ["a", "b", "c"]) for model in models}
    after = {model: choose_shard(model, ["b", "d", "a", "c"]) for model in models}
    assert {after[model] for model in models if after[model] != before[model]} == {"d"}
    counts = [list(after.values()).count(name) for name in "abcd"]
    assert min(counts) > 300 / 4 / 2


async def test_waiting_requests_at_home_remain_when_shards_are_added(connect: Connect, plain: Plain) -> None:
    at_home = Broker(plain["home"], Keys().model("old"))
    assert await at_home.enqueue("r", b"payload", result_ttl_ms=1000) == NEW
    commands = connect()
    wave = await Broker(commands, Keys().model("old")).claim("e", EngineCapacity(max_num_seqs=9))
    assert [claim.request_id for claim in wave.claims] == ["r"]
    assert await commands.placements.find("old") == "home"
    # Who knows no shards goes on with it.
    assert await at_home.state("r") is not None


async def test_a_client_without_shards_is_refused_for_a_model_on_another_shard(
    connect: Connect, deployment: Deployment, plain: Plain
) -> None:
    await Broker(connect({"a": deployment.shards["a"]}), Keys().model("m")).enqueue("r", b"payload", result_ttl_ms=1000)
    mistaken = Broker(plain["home"], Keys().model("m"))
    with pytest.raises(ConfigurationError, match=r"model 'm' is on shard 'a'.*set PENSTOCK_SHARDS"):
        await mistaken.enqueue("r2", b"payload", result_ttl_ms=1000)
    with pytest.raises(ConfigurationError, match="is on shard 'a'"):
        await mistaken.claim("e", EngineCapacity(max_num_seqs=1))
    assert await keys_at(plain["home"], "m") == set()


async def test_a_shard_that_a_process_does_not_know_is_named(
    connect: Connect, deployment: Deployment, plain: Plain
) -> None:
    await place(plain["home"], "m", "b")
    broker = Broker(connect({"a": deployment.shards["a"]}), Keys().model("m"))
    with pytest.raises(
        ConfigurationError, match=r"model 'm' lives on shard 'b', which this process does not know \(a\)"
    ):
        await broker.enqueue("r", b"payload", result_ttl_ms=1000)
    with pytest.raises(ConfigurationError, match="lives on shard 'b'"):
        await broker.state("r")


async def test_a_dead_shard_does_not_block_the_others(
    connect: Connect, deployment: Deployment, plain: Plain, client: Client
) -> None:
    """Requests, client leases, readers and reapers of one shard continue while another is away."""
    commands = connect(retry_for_s=float("inf"))
    for model, name in (("ma", "a"), ("mb", "b")):
        await place(plain["home"], model, name)
        await serve(commands, model)
    of_a, of_b = (Broker(commands, Keys().model(model)) for model in ("ma", "mb"))

    async def read(model: str) -> list[int]:
        return [
            token async for delta in client.stream("hi", SamplingParams(), model=model) for token in delta.token_ids
        ]

    reading_a, reading_b = asyncio.create_task(read("ma")), asyncio.create_task(read("mb"))
    claim_a, claim_b = await claim_one(of_a), await claim_one(of_b)
    await until_followed(plain["a"], of_a, claim_a)
    await until_followed(plain["b"], of_b, claim_b)
    await write(of_a, claim_a, 0, 1)
    deployment.servers["a"].kill()
    writing = asyncio.create_task(write(of_a, claim_a, 1, 2, end=FinishReason.STOP))
    await write(of_b, claim_b, 0, 3)
    await write(of_b, claim_b, 1, 4, end=FinishReason.STOP)
    assert await reading_b == [3, 4]
    # A process that comes now is not kept out, either.
    async with Client.connect(deployment.url, shards=deployment.shards) as late:
        answering = asyncio.create_task(answer(of_b, 8, 9))
        assert (await late.generate("hi", SamplingParams(), model="mb")).outputs[0].token_ids == [8, 9]
        await answering
    assert not writing.done()
    deployment.servers["a"].start()
    await writing
    assert await reading_a == [1, 2]


async def test_queues_and_control_of_models_on_shards(connect: Connect, plain: Plain, client: Client) -> None:
    await place(plain["home"], "m", "b")
    commands = connect()
    broker = await serve(commands, "m")
    await broker.enqueue("r", b"payload", result_ttl_ms=1000)
    queue = Queue(commands, Keys().model("m"))
    assert await queue.pause(put_back=True) == 0
    assert await client.is_paused("m")
    assert (await client.queue_stats("m")).depth == 1
    assert (await broker.claim("e", EngineCapacity(max_num_seqs=1))).claims == []
    await queue.resume()
    assert (await claim_one(broker)).request_id == "r"


async def test_dead_engines_are_detected_while_another_shard_is_away(
    connect: Connect, deployment: Deployment, plain: Plain
) -> None:
    commands = connect(retry_for_s=float("inf"))
    for model, name in (("ma", "a"), ("mb", "b")):
        await place(plain["home"], model, name)
        await serve(commands, model)
    of_b = Broker(commands, Keys().model("mb"))
    await of_b.enqueue("r", b"payload", result_ttl_ms=1000)
    config = WorkerConfig(
        worker_id="w", engine_id="w-0", redis_url="", engine=EngineConfig(model="x"), lease_ttl_s=LEASE_TTL_MS / 1000
    )
    deployment.servers["a"].kill()
    reaping = asyncio.create_task(Reaper(commands, config).run())

    async def is_queued() -> bool:
        return await of_b.state("r") is RequestState.QUEUED

    try:
        for owner in range(2):
            claims = (await of_b.claim(f"e{owner}", EngineCapacity(max_num_seqs=1), lease_ttl_ms=LEASE_TTL_MS)).claims
            assert [claim.request_id for claim in claims] == ["r"]
            await until(is_queued)
    finally:
        reaping.cancel()
        await asyncio.gather(reaping, return_exceptions=True)


async def test_ends_are_delivered_while_another_shard_is_away(
    connect: Connect, deployment: Deployment, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "PATIENCE_S", 0.1)
    commands = connect(retry_for_s=float("inf"))
    for model, name in (("ma", "a"), ("mb", "b")):
        await place(plain["home"], model, name)
        await commands.execute("SADD", Keys().webhook_models(), model)
    of_b = Keys().model("mb").outbox
    deployment.servers["a"].kill()
    outbox = Outbox(commands, Keys(), EventStore(commands, Keys(), Agenda(commands, Keys())))

    async def is_empty() -> bool:
        await outbox.collect()
        return await commands.execute("XLEN", of_b) == 0

    try:
        for _ in range(2):
            await commands.execute("XADD", of_b, "*", "no", "event")
            await until(is_empty)
    finally:
        await outbox.close()
