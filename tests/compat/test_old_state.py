"""This version continues the requests that an earlier version left in Redis.

``state_VERSION.json`` has the keys of a model with a request in each state, as ``record_state.py`` wrote them with the
code of that version. They are never changed: a script that cannot go on with them loses requests in an upgrade.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.shared.broker import Broker, Claim, DeadLetter, EngineCapacity, FinalRecord, Queue, Record
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import DeathCause
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.messages.requests import EngineCoreRequest, InputChunk

RECORDED = sorted(Path(__file__).parent.glob("state_*.json"))
OLD_ENGINE, OLD_EPOCH = "host-1-0", 1
CAUSE = DeathCause(engine_id=OLD_ENGINE, reason="its lease ended")


async def put(commands: CommandConnection, key: bytes, kind: str, value: Any, ttl_ms: int) -> None:
    """Make one key as it was; text is Latin-1 of its bytes."""

    def raw(text: str) -> bytes:
        return text.encode("latin-1")

    if kind == "string":
        await commands.execute("SET", key, raw(value))
    elif kind == "stream":
        for entry_id, fields in value:
            await commands.execute("XADD", key, entry_id, *map(raw, fields))
    elif kind == "zset":
        pairs = zip(value[1::2], map(raw, value[::2]), strict=True)
        await commands.execute("ZADD", key, *(word for pair in pairs for word in pair))
    else:
        write = {"list": "RPUSH", "set": "SADD", "hash": "HSET"}[kind]
        await commands.execute(write, key, *map(raw, value))
    if ttl_ms > 0:
        await commands.execute("PEXPIRE", key, ttl_ms)


@pytest.fixture(params=RECORDED, ids=lambda path: path.stem)
async def broker(request: pytest.FixtureRequest, commands: CommandConnection, namespace: str) -> Broker:
    """Broker over a Redis that holds the recorded keys, in a namespace of the test's own."""
    for state in json.loads(request.param.read_text()):
        key = state["key"].replace("recorded:", f"{namespace}:", 1).encode()
        await put(commands, key, state["kind"], state["value"], state["ttl_ms"])
    return Broker(commands, Keys(namespace).model("m"))


async def claim_all(broker: Broker) -> dict[str, Claim]:
    """Claim as a worker does: a claim that needed a repair is returned, and claimed again.

    Rooms of engines of 0.1 are in no sum, so the first claim after the death of one makes the sums anew.
    """
    claims = (await broker.claim("new", EngineCapacity(max_num_seqs=9))).claims
    claim_ids = {(claim.request_id, claim.epoch) for claim in claims}
    if unseen := [entry for entry in await broker.claims("new") if entry not in claim_ids]:
        assert await broker.release(unseen) == len(unseen)
        room = EngineCapacity(max_num_seqs=9, num_seqs=len(claims))
        claims += (await broker.claim("new", room)).claims
    return {claim.request_id: claim for claim in claims}


async def end(broker: Broker, claim: Claim) -> None:
    """Write the token after those that are logged, and the end."""
    index = claim.num_logged_tokens
    delta = Delta(index=index, token_ids=[index + 1], text="x")
    assert await broker.append([Record(claim.request_id, claim.epoch, delta)]) == []
    last = Delta(index=index + 1, finish_reason=FinishReason.STOP, usage=Usage(5, index + 1))
    assert await broker.finish([FinalRecord(claim.request_id, claim.epoch, last)]) == []


async def tokens(broker: Broker, request_id: str) -> list[int]:
    return [token for delta in await broker.read_log(request_id) for token in delta.token_ids]


async def test_waiting_and_running_requests_resume_in_place(broker: Broker) -> None:
    assert await broker.reclaim(OLD_ENGINE, CAUSE, is_external=True, max_deliveries=3) == (1, 0)
    claims = await claim_all(broker)
    logged = {name: claim.num_logged_tokens for name, claim in claims.items()}
    assert logged == {"returned": 2, "held": 2, "waiting": 0}
    for name, claim in claims.items():
        payload = msgspec.msgpack.decode(claim.payload, type=EngineCoreRequest)
        assert payload.sampling_params is not None
        assert (payload.request_id, payload.prompt, payload.sampling_params.seed) == (name, "p", 3)
        await end(broker, claim)
    assert {name: await tokens(broker, name) for name in claims} == {
        "returned": [1, 2, 3],
        "held": [1, 2, 3],
        "waiting": [1],
    }
    assert {await broker.state(name) for name in claims} == {"finished"}


async def test_a_worker_that_was_forgotten_is_refused(broker: Broker) -> None:
    await broker.reclaim(OLD_ENGINE, CAUSE, is_external=True, max_deliveries=3)
    claim = (await claim_all(broker))["held"]
    late = Delta(index=2, token_ids=[99])
    assert await broker.append([Record("held", OLD_EPOCH, late)]) == ["held"]
    await end(broker, claim)
    assert await tokens(broker, "held") == [1, 2, 3]


async def test_results_and_the_dead_letter_are_readable(broker: Broker, commands: CommandConnection) -> None:
    assert (await broker.state("ended"), await tokens(broker, "ended")) == ("finished", [1, 2, 3])
    dead = DeadLetter(commands, broker.keys)
    (parked,) = await dead.list()
    assert parked.cause is not None
    assert (parked.request_id, parked.cause.reason) == ("parked", "it fell over")
    assert await dead.replay("parked")
    await end(broker, (await claim_all(broker))["parked"])
    assert await tokens(broker, "parked") == [1]


async def test_streamed_input_continues(broker: Broker) -> None:
    assert await broker.state("awaiting") == "awaiting_input"
    assert await broker.input.extend("awaiting", 1, InputChunk(prompt="more"))
    await broker.input.close("awaiting")
    claim = (await claim_all(broker))["awaiting"]
    assert claim.num_logged_tokens == 3
    await end(broker, claim)
    assert await tokens(broker, "awaiting") == [1, 2, 3, 4]


async def test_the_queue_counts_the_old_entries(broker: Broker, commands: CommandConnection) -> None:
    queue = Queue(commands, broker.keys)
    before = await queue.stats(tenants=True)
    assert ([band.depth for band in before.bands], before.num_tokens, before.num_returned) == ([0, 0, 1], 14, 1)
    await broker.reclaim(OLD_ENGINE, CAUSE, is_external=True, max_deliveries=3)
    for claim in (await claim_all(broker)).values():
        await end(broker, claim)
    after = await queue.stats(tenants=True)
    assert (after.depth, after.num_tokens, after.num_returned, after.num_running) == (0, 0, 0, 0)
