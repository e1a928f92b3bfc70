"""A model gets partitions while its requests run, and engines of it are killed: no caller sees anything of either."""

from __future__ import annotations

import os
import signal

from penstock.ops.local.stack import LocalStack
from penstock.producer import Client
from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys
from penstock.shared.partitions import change_partitions
from penstock.shared.partitions.layout import choose_partition

from ...gate import Gate
from ..conftest import Start
from ..watching import LONG, PARAMS, PROMPT, Watched, busiest, finish, start_streams, undisturbed, until

NUM = 3
# One for each partition.
TENANTS = [next(f"t{n}" for n in range(1000) if choose_partition(f"t{n}", NUM) == number) for number in range(NUM)]


async def claims_of(stack: LocalStack) -> list[int]:
    """Return the number of requests of each partition that engines hold."""
    connection, keys = CommandConnection(stack.url), Keys()
    counts = [0] * NUM
    for number in range(NUM):
        broker = Broker(connection, keys.model("demo", number), number)
        for engine_id in await broker.engines():
            counts[number] += len(await broker.claims(engine_id))
    await connection.close()
    return counts


async def test_requests_continue_while_a_model_is_partitioned_and_an_engine_killed(start: Start, gate: Gate) -> None:
    stack = await start(2, "--deterministic")
    async with Client.connect(stack.url) as client:
        whole, watched = await start_streams(client, gate)
        connection = CommandConnection(stack.url)
        await change_partitions(connection, Keys(), "demo", NUM)
        await connection.close()
        for tenant in TENANTS:
            watched += [Watched(client.stream(PROMPT, params, tenant=tenant)) for params in PARAMS]
        await until(lambda: all(one.num_tokens for one in watched), what="the streams of all partitions do not start")
        assert all(await claims_of(stack))
        os.kill((await busiest(stack.url)).worker_pid, signal.SIGKILL)
        await finish(watched, whole * (1 + NUM), gate)
    assert await claims_of(stack) == [0] * NUM


async def test_the_only_engine_resumes_its_requests_in_all_partitions(start: Start, gate: Gate) -> None:
    """Also in those that go away meanwhile, whose tenants ask on in the one that stays."""
    stack = await start(1, "--deterministic")
    connection = CommandConnection(stack.url)
    await change_partitions(connection, Keys(), "demo", NUM)
    async with Client.connect(stack.url) as client:
        whole = await undisturbed(client, PARAMS[:1])
        gate.hold_at(LONG - 1)
        watched = [Watched(client.stream(PROMPT, PARAMS[0], tenant=tenant)) for tenant in TENANTS]
        await until(lambda: all(one.num_tokens for one in watched), what="the streams do not start")
        await change_partitions(connection, Keys(), "demo", 1)
        watched += [Watched(client.stream(PROMPT, PARAMS[0], tenant=tenant)) for tenant in TENANTS]
        await until(lambda: all(one.num_tokens for one in watched), what="the streams of the others do not start")
        assert await claims_of(stack) == [1 + NUM, 1, 1]
        os.kill((await busiest(stack.url)).core_pid, signal.SIGKILL)
        await finish(watched, whole * 2 * NUM, gate)
    await connection.close()
