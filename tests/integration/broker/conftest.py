from __future__ import annotations

import pytest

from penstock.shared.broker import NEW, Broker, FinalRecord, Record
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys
from penstock.shared.messages import Delta, FinishReason
from penstock.shared.records import DeathCause

TTL_MS = 60_000
CAUSE = DeathCause(engine_id="e0", reason="it fell over", last_step=7, trace="Traceback")


@pytest.fixture
def broker(commands: CommandConnection, namespace: str) -> Broker:
    return Broker(commands, Keys(namespace).model("m"))


async def enqueue(broker: Broker, *request_ids: str) -> None:
    for request_id in request_ids:
        assert await broker.enqueue(request_id, b"payload", result_ttl_ms=TTL_MS) == NEW


def record(request_id: str, epoch: int, index: int, *token_ids: int) -> Record:
    return Record(request_id, epoch, Delta(index=index, token_ids=list(token_ids), text="x" * len(token_ids)))


def final(request_id: str, epoch: int, index: int, *token_ids: int) -> FinalRecord:
    delta = Delta(index=index, token_ids=list(token_ids), finish_reason=FinishReason.STOP)
    return FinalRecord(request_id, epoch, delta)


async def die(broker: Broker, engine_id: str, *, external: bool, max_deliveries: int = 3) -> tuple[int, int]:
    return await broker.reclaim(engine_id, CAUSE, is_external=external, max_deliveries=max_deliveries)
