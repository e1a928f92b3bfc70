"""Record the keys that a version leaves in Redis after its workers ended, with a request in each state.

Run by hand with the code of that version on the path, and never again for it:
``PYTHONPATH=FOLDER python tests/compat/record_state.py URL tests/compat/state_VERSION.json``, where ``FOLDER/penstock``
links to the packages of its checkout, and URL names an empty Redis.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from penstock.shared.broker import Broker, Claim, EngineCapacity, FinalRecord, Record, SegmentRecord
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import DeathCause
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta, SegmentEnd
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams

NAMESPACE, MODEL = "recorded", "m"
TTL_MS = 3_600_000
READ = {
    "string": ("GET",),
    "list": ("LRANGE", 0, -1),
    "set": ("SMEMBERS",),
    "zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    "hash": ("HGETALL",),
    "stream": ("XRANGE", "-", "+"),
}


async def enqueue(broker: Broker, request_id: str, **options: Any) -> None:
    request = EngineCoreRequest(
        request_id=request_id, model=MODEL, prompt="p", sampling_params=SamplingParams(max_tokens=9, seed=3)
    )
    encoded = msgspec.msgpack.encode(request)
    await broker.enqueue(request_id, encoded, result_ttl_ms=TTL_MS, num_prompt_tokens=5, max_tokens=9, **options)


async def claim_and_append(broker: Broker, request_id: str) -> int:
    """Claim the only request that waits, write its first tokens, and return the epoch."""
    (claim,) = (await broker.claim("host-1-0", EngineCapacity(max_num_seqs=9), lease_ttl_ms=1)).claims
    assert claim.request_id == request_id
    delta = Delta(index=0, token_ids=[1, 2], text="ab")
    assert await broker.append([Record(request_id, claim.epoch, delta)]) == []
    return claim.epoch


async def leave_all(broker: Broker) -> None:
    """Leave one request in each state that outlives a worker; each is claimed while no other one waits."""
    for name in ("ended", "parked", "held"):
        await enqueue(broker, name)
        epoch = await claim_and_append(broker, name)
        if name == "ended":
            last = Delta(index=2, token_ids=[3], text="c", finish_reason=FinishReason.STOP, usage=Usage(5, 3))
            assert await broker.finish([FinalRecord(name, epoch, last)]) == []
        elif name == "parked":
            cause = DeathCause(engine_id="host-1-0", reason="it fell over", last_step=7, trace="Traceback")
            claimed = Claim(name, b"", epoch, 2, 1)
            assert await broker.park(claimed, cause, "poison_request", "engines died on it")
    await enqueue(broker, "awaiting", is_resumable=True)
    epoch = await claim_and_append(broker, "awaiting")
    ends = [SegmentEnd(number=0, next_index=3, finish_reason=FinishReason.STOP)]
    delta = Delta(index=2, token_ids=[3], text="c", segment_ends=ends, usage=Usage(5, 3))
    assert await broker.end_segments([SegmentRecord("awaiting", epoch, delta)]) == []
    await enqueue(broker, "returned")
    assert await broker.release([("returned", await claim_and_append(broker, "returned"))]) == 1
    await enqueue(broker, "waiting", tenant="acme", band="batch")


def as_text(value: Any) -> Any:
    """Bytes as Latin-1 text, so that JSON takes them."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return [as_text(each) for each in value] if isinstance(value, list) else value


async def record(url: str) -> list[dict[str, Any]]:
    connection = CommandConnection(url)
    await leave_all(Broker(connection, Keys(NAMESPACE).model(MODEL)))
    states = []
    for key in sorted(await connection.execute("KEYS", "*")):
        kind = (await connection.execute("TYPE", key)).decode()
        name, *rest = READ[kind]
        value = await connection.execute(name, key, *rest)
        ttl_ms = await connection.execute("PTTL", key)
        states.append({"key": as_text(key), "kind": kind, "ttl_ms": ttl_ms, "value": as_text(value)})
    await connection.close()
    return states


if __name__ == "__main__":
    _, where, into = sys.argv
    Path(into).write_text(json.dumps(asyncio.run(record(where)), indent=1) + "\n")
