"""``penstock queue`` and ``penstock dead`` of a model with partitions, and a partition on its way to another shard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.ops import cli as penstock_cli
from penstock.producer import Client, SamplingParams
from penstock.shared.broker import EngineCapacity
from penstock.shared.process.command_line import EXIT_FAILED
from penstock.shared.shards import ShardMover, make_servers, recorded_places

from ..shards.conftest import Deployment
from .conftest import MODEL, Parts, tenant_of

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(place: tuple[str, dict[str, str]], namespace: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``penstock ...`` in this process, in a thread; returns status, output and errors."""
    url, shards = place
    where = ["--redis-url", url, "--namespace", namespace]
    where += ["--shards", ",".join(f"{name}={at}" for name, at in shards.items())] if shards else []

    def run(*arguments: str) -> tuple[int, str, str]:
        status = penstock_cli.main([*arguments, *where])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


async def test_the_command_gives_partitions_and_shows_them(client: Client, parts: Parts, run: Run) -> None:
    await client.submit("hi", SamplingParams(), tenant="t")
    status, said, _ = await asyncio.to_thread(run, "queue", "partitions", MODEL, "3", "--spread", "big,huge")
    assert status == 0
    assert [line.split() for line in said.splitlines()[1:4]] == [
        ["m", "1", "0", "open"],
        ["m#1", "0", "0", "open"],
        ["m#2", "0", "0", "open"],
    ]
    assert "spread over all: big, huge" in said
    tenant = tenant_of(2, 3)
    await client.submit("hi", SamplingParams(), tenant=tenant, request_id="x")
    _, said, _ = await asyncio.to_thread(run, "queue", "show", MODEL)
    assert "waiting:" in said
    assert said.startswith("model:      m\n")
    assert tenant in said
    _, said, _ = await asyncio.to_thread(run, "queue", "show", MODEL, "--request", "x")
    assert "queued" in said
    assert (await asyncio.to_thread(run, "queue", "pause", MODEL))[0] == 0
    assert [line.split()[-1] for line in (await asyncio.to_thread(run, "queue", "partitions", MODEL))[1].splitlines()][
        1:4
    ] == ["paused"] * 3
    assert "2 wait" in (await asyncio.to_thread(run, "queue", "resume", MODEL))[1]
    assert "1" in (await asyncio.to_thread(run, "queue", "purge", MODEL, "--tenant", tenant, "--yes"))[1]
    assert (await client.queue_stats()).depth == 1


async def test_invalid_partitions_are_refused_with_a_reason(client: Client, run: Run) -> None:
    assert (await asyncio.to_thread(run, "queue", "partitions", MODEL, "2"))[0] == 0
    for number in ("0", "65"):
        status, _, said = await asyncio.to_thread(run, "queue", "partitions", MODEL, number)
        assert status == EXIT_FAILED
        assert "partitions must be a number in [1, 64]" in said
    status, _, said = await asyncio.to_thread(run, "queue", "partitions", "m#1", "2")
    assert status == EXIT_FAILED
    assert "'m#1'" in said


async def test_the_command_takes_partitions_away_when_nothing_is_left_in_them(
    client: Client, parts: Parts, run: Run
) -> None:
    await parts.grow(2)
    await client.submit("hi", SamplingParams(), tenant=tenant_of(1, 2), request_id="x")
    status, said, _ = await asyncio.to_thread(run, "queue", "partitions", MODEL, "1")
    assert status == 0
    assert [line.split()[0] for line in said.splitlines()[1:3]] == ["m", "m#1"]
    assert "those from m#1 on go" in said
    _, _, said = await asyncio.to_thread(run, "queue", "partitions", MODEL, "3")
    assert "still have requests" in said
    await (await client.handle("x")).cancel()
    await parts[1].forget("x")
    _, said, _ = await asyncio.to_thread(run, "queue", "partitions", MODEL, "1")
    assert [line.split()[0] for line in said.splitlines()[1:]] == ["m"]


@pytest.mark.parametrize("place", ["shards"], indirect=True)
async def test_a_partition_moves_to_another_shard(client: Client, parts: Parts, deployment: Deployment) -> None:
    await parts.grow(2)
    tenant = tenant_of(1, 2)
    for number in range(3):
        await client.submit("hi", SamplingParams(), tenant=tenant, request_id=f"r{number}")
    servers = make_servers(deployment.url, deployment.shards)
    places = await recorded_places(servers["home"], parts.keys)
    target = next(name for name in servers if name != places["m#1"])
    await ShardMover(servers, parts.keys).move("m#1", target)
    assert await recorded_places(servers["home"], parts.keys) == {**places, "m#1": target}
    for server in servers.values():
        await server.close()
    await client.submit("hi", SamplingParams(), tenant=tenant, request_id="r3")
    claims = (await parts[1].claim("e", EngineCapacity(max_num_seqs=10))).claims
    assert [claim.request_id for claim in claims] == ["r0", "r1", "r2", "r3"]
    assert (await client.status("r2")).engine_id == "e"
