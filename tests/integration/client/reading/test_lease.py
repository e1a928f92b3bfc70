"""Interactive requests live by their client's lease, detached ones by nobody's."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from penstock.producer import Client, FinishReason
from penstock.shared import errors
from penstock.shared.broker import NEW, Broker, EngineCapacity
from penstock.shared.connection import CommandConnection

from ..harness import DEADLINE_S, claim_one, until, write

LEASE_TTL_S = 0.6

# Streams "streamed" to standard output, after having submitted "detached".
PROGRAM = f"""
import asyncio, sys
from penstock.producer import Client

async def main(url, namespace):
    async with Client.connect(url, namespace=namespace, lease_ttl_s={LEASE_TTL_S}) as client:
        await client.submit("hi", request_id="detached")
        async for delta in client.stream("hi", request_id="streamed"):
            print(delta.text, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
async def other_process(redis_url: str, namespace: str, broker: Broker) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, redis_url, namespace, stdout=PIPE)
    yield process
    if process.returncode is None:
        process.kill()
    await process.wait()


async def read_line(process: Process) -> bytes:
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        return await process.stdout.readline()


async def now(commands: CommandConnection) -> float:
    seconds, microseconds = await commands.execute("TIME")
    return int(seconds) + int(microseconds) / 1e6


async def lease_ends(commands: CommandConnection, broker: Broker) -> list[float]:
    return [
        float(ms) / 1000 for ms in (await commands.execute("ZRANGE", broker.keys.clients, 0, -1, "WITHSCORES"))[1::2]
    ]


async def test_the_lease_is_renewed_while_something_streams_and_only_then(redis_url, namespace, broker, commands):
    async with Client.connect(redis_url, namespace=namespace, lease_ttl_s=0.15) as client:
        await client.submit("hi", request_id="detached")
        await claim_one(broker)
        assert await lease_ends(commands, broker) == []
        streams = [asyncio.ensure_future(client.generate("hi")) for _ in range(3)]
        claims = [await claim_one(broker) for _ in streams]
        (first,) = await lease_ends(commands, broker)

        async def outlived_twice() -> bool:
            (end,) = await lease_ends(commands, broker)
            return end > first + 0.3

        await until(outlived_twice)
        for claim in claims:
            await write(broker, claim, 0, 65, end=FinishReason.STOP)
        await asyncio.gather(*streams)
        await client.status("detached")  # behind what the client may have sent before the last stream ended
        (last,) = await lease_ends(commands, broker)

        async def has_ended() -> bool:
            return await now(commands) > last + 0.15

        await until(has_ended)
        assert await lease_ends(commands, broker) == [last]


async def test_a_refused_renewal_is_repeated(user_url, namespace, broker, commands):
    """An administrator who takes rights from a client for a moment must not end its requests later."""
    async with Client.connect(user_url, namespace=namespace, lease_ttl_s=0.15) as client:
        stream = asyncio.ensure_future(client.generate("hi"))
        claim = await claim_one(broker)
        with capture_logs() as logs:
            await commands.execute("ACL", "SETUSER", namespace, "-@scripting")

            async def is_refused() -> bool:
                return any(event["event"] == "client_lease_not_renewed" for event in logs)

            await until(is_refused)
            await commands.execute("ACL", "SETUSER", namespace, "+@all")
        (refused_until,) = await lease_ends(commands, broker)

        async def is_renewed() -> bool:
            return await lease_ends(commands, broker) > [refused_until + 0.15]

        await until(is_renewed)
        await write(broker, claim, 0, 65, end=FinishReason.STOP)
        await stream


@pytest.mark.usefixtures("reaper")
async def test_a_killed_client_loses_only_its_streamed_requests(broker, other_process) -> None:
    claims = {claim.request_id: claim for claim in (await claim_one(broker), await claim_one(broker))}
    await write(broker, claims["streamed"], 0, 65)
    assert await read_line(other_process) == b"A\n"
    other_process.kill()

    async def is_cancelled() -> bool:
        return await broker.state("streamed") == "cancelled"

    await until(is_cancelled)
    await write(broker, claims["detached"], 0, 65, end=FinishReason.STOP)


@pytest.mark.usefixtures("reaper")
async def test_a_suspended_client_keeps_its_requests_and_resumes(broker, commands, other_process) -> None:
    claims = {claim.request_id: claim for claim in (await claim_one(broker), await claim_one(broker))}
    await write(broker, claims["streamed"], 0, 65)
    assert await read_line(other_process) == b"A\n"
    other_process.send_signal(signal.SIGSTOP)
    stopped_at = await now(commands)
    index = 1
    # As long as two of its leases, it being dead for all the reaper can see but for its subscription.
    while await now(commands) < stopped_at + 2 * LEASE_TTL_S:
        await write(broker, claims["streamed"], index, 66)
        index += 1
        await asyncio.sleep(0.01)
    other_process.send_signal(signal.SIGCONT)
    await write(broker, claims["streamed"], index, 67, end=FinishReason.STOP)
    async with asyncio.timeout(DEADLINE_S):
        output, _ = await other_process.communicate()
    assert output.replace(b"\n", b"") == b"B" * (index - 1) + b"C"


@pytest.mark.usefixtures("reaper")
async def test_a_second_listener_keeps_the_request_of_a_killed_client(client, broker, other_process) -> None:
    claims = {claim.request_id: claim for claim in (await claim_one(broker), await claim_one(broker))}
    await write(broker, claims["streamed"], 0, 65)
    attached = client.stream("hi", request_id="streamed")
    assert (await anext(attached)).text == "A"
    other_process.kill()
    await other_process.wait()
    last = asyncio.ensure_future(anext(attached))
    started = time.monotonic()

    async def lease_is_long_over() -> bool:
        return time.monotonic() > started + 2 * LEASE_TTL_S

    await until(lease_is_long_over)
    await write(broker, claims["streamed"], 1, 66, end=FinishReason.STOP)
    assert (await last).text == "B"


async def test_an_enqueue_that_is_sent_again_is_new_again(broker: Broker) -> None:
    async def enqueue(call: str) -> str:
        return await broker.enqueue("r", b"", result_ttl_ms=1000, client_id="c", client_ttl_ms=1000, call=call)

    assert [await enqueue("one"), await enqueue("one"), await enqueue("two")] == [NEW, NEW, "queued"]
    assert len((await broker.claim("e0", EngineCapacity(max_num_seqs=5))).claims) == 1


async def test_an_enqueue_with_a_lost_reply_still_owns_its_request(client, broker, commands) -> None:
    reading = asyncio.ensure_future(client.generate("hi", request_id="r"))
    # Redis accepts the enqueue, and the client's connections die before the answer is read: sooner or later, as they
    # live a little longer each time.
    life_s = 0.0
    while not await broker.state("r"):
        await commands.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await asyncio.sleep(life_s)
        life_s += 0.0002
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)

    async def is_cancelled() -> bool:
        return await broker.state("r") == "cancelled"

    await until(is_cancelled)
    assert (await broker.claim("e0", EngineCapacity(max_num_seqs=5))).claims == []


async def test_leaving_while_attaching_cancels_nothing(client: Client, broker: Broker) -> None:
    await client.submit("hi", request_id="r")
    for num_turns in range(40):
        attaching = asyncio.ensure_future(client.generate("hi", request_id="r"))
        for _ in range(num_turns):
            await asyncio.sleep(0)  # to anywhere between the call and the answer
        attaching.cancel()
        await asyncio.gather(attaching, return_exceptions=True)
    assert await broker.state("r") == "queued"


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), True, "1"])
async def test_a_lease_must_have_a_length(redis_url: str, value: object) -> None:
    with pytest.raises(errors.ValidationError, match="lease_ttl_s must be positive"):
        Client(redis_url, lease_ttl_s=value)  # type: ignore[arg-type]  # the mistake under test


@pytest.mark.usefixtures("reaper")
async def test_a_lingering_request_continues_while_a_reader_follows_it(client, broker, commands) -> None:
    async def begin(request_id: str) -> asyncio.Task[None]:
        task = asyncio.create_task(read_one(request_id))
        await write(broker, await claim_one(broker), 0, 65)
        return task

    async def read_one(request_id: str) -> None:
        async for _ in client.stream("hi", request_id=request_id, linger_s=0.3):
            await may_leave.wait()
            return

    async def is_cancelled(request_id: str) -> bool:
        return await broker.state(request_id) == "cancelled"

    may_leave = asyncio.Event()
    leaving = [await begin(request_id) for request_id in ("followed", "alone")]
    follower = (await client.handle("followed")).stream()
    assert (await anext(follower)).text == "A"
    left_after = await now(commands)
    may_leave.set()
    await asyncio.gather(*leaving)
    await until(lambda: is_cancelled("alone"))
    assert await now(commands) > left_after + 0.299  # of which Redis counts whole milliseconds
    assert await broker.state("followed") == "claimed"
    await follower.aclose()
    await until(lambda: is_cancelled("followed"))


async def test_leaving_a_request_that_has_ended_or_is_detached_changes_nothing(client, broker) -> None:
    handle = await client.submit("hi")
    await broker.leave(handle.request_id, 1)
    assert await broker.state(handle.request_id) == "queued"
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65, end=FinishReason.STOP)
    await broker.leave(handle.request_id, 1)
    await broker.leave("unknown", 1)
    assert [await broker.state(request_id) for request_id in (handle.request_id, "unknown")] == ["finished", None]
