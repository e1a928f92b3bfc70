"""Redis forgets its last writes, and an owner that it has forgotten lives on: its tokens are refused.

Which owner is the right one only Redis can say, by the epoch of its claim. So an epoch that was given once must not be
given again, whatever was lost: by a failover to a replica that was cut off, with the end of the append-only file, or
with all that came after a backup.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest

from penstock.ops.lab.clusters.redis_processes import free_port
from penstock.shared.broker import Broker, Claim, EngineCapacity, FinalRecord, Record
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason

from ..redis_server import RedisServer


@asynccontextmanager
async def broker_of(server: RedisServer) -> AsyncIterator[Broker]:
    connection = CommandConnection(server.url)
    try:
        yield Broker(connection, Keys().model("m"))
    finally:
        await connection.close()


class Loss(Protocol):
    """A way in which Redis loses the writes since ``begin``; ``take_over`` returns the server afterwards."""

    redis: RedisServer

    def start(self) -> None: ...

    def begin(self) -> None: ...

    def take_over(self) -> RedisServer: ...

    def kill(self) -> None: ...


class Failover:
    """A replica that is cut off from its primary is promoted."""

    def __init__(self, folder: Path) -> None:
        self.redis, self._replica = RedisServer(folder / "primary"), RedisServer(folder / "replica")

    def start(self) -> None:
        port = free_port()
        self.redis.start("--appendonly", "no", "--port", str(port))
        self._replica.start("--appendonly", "no", "--replicaof", "127.0.0.1", str(port))
        self.redis.wait_until_ready()
        self._replica.wait_until_ready()

    def begin(self) -> None:
        assert self.redis.execute("WAIT", 1, 0) == 1  # it has all writes so far
        self._replica.execute("REPLICAOF", "127.0.0.1", 1)  # and gets no more: its connection is gone

    def take_over(self) -> RedisServer:
        self.redis.kill()
        self._replica.execute("REPLICAOF", "NO", "ONE")
        return self._replica

    def kill(self) -> None:
        self.redis.kill()
        self._replica.kill()


class LostEnd:
    """The server dies before the end of its append-only file has reached the disk."""

    def __init__(self, folder: Path) -> None:
        self.redis = RedisServer(folder)

    def start(self) -> None:
        self.redis.start()
        self.redis.wait_until_ready()

    def begin(self) -> None:
        self._file = self.redis.append_only_file
        self._size = self._file.stat().st_size

    def take_over(self) -> RedisServer:
        self.redis.kill()
        os.truncate(self._file, self._size)
        self.start()
        return self.redis

    def kill(self) -> None:
        self.redis.kill()


class Backup:
    """A backup is restored; how old it is makes no difference."""

    def __init__(self, folder: Path) -> None:
        self.redis = RedisServer(folder)

    def start(self) -> None:
        self.redis.start("--appendonly", "no")
        self.redis.wait_until_ready()

    def begin(self) -> None:
        self.redis.execute("SAVE")

    def take_over(self) -> RedisServer:
        self.redis.kill()
        self.start()
        return self.redis

    def kill(self) -> None:
        self.redis.kill()


def record(claim: Claim, index: int, *token_ids: int) -> Record:
    return Record(claim.request_id, claim.epoch, Delta(index=index, token_ids=list(token_ids)))


async def claim(broker: Broker, engine_id: str) -> Claim:
    (claim,) = (await broker.claim(engine_id, EngineCapacity(max_num_seqs=1))).claims
    return claim


@pytest.fixture(params=[Failover, LostEnd, Backup])
def loss(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loss]:
    loss = request.param(tmp_path)
    yield loss
    loss.kill()


async def test_an_owner_that_redis_has_forgotten_is_refused(loss: Loss) -> None:
    await asyncio.to_thread(loss.start)
    async with broker_of(loss.redis) as broker:
        await broker.enqueue("r", b"p", result_ttl_ms=60_000)
        await asyncio.to_thread(loss.begin)
        forgotten = await claim(broker, "a")
        assert await broker.append([record(forgotten, 0, 1, 2, 3)]) == []
    successor = await asyncio.to_thread(loss.take_over)
    async with broker_of(successor) as broker:
        assert await broker.state("r") == "queued"
        owner = await claim(broker, "b")
        assert await broker.append([record(owner, 0, 11, 12), record(owner, 2, 13)]) == []
        # The engine lives on, and the next token it has would fit the new log.
        assert await broker.renew("a", [("r", forgotten.epoch)]) == ["r"]
        assert await broker.append([record(forgotten, 3, 99)]) == ["r"]
        assert await broker.release([("r", forgotten.epoch)]) == 0
        end = Delta(index=3, finish_reason=FinishReason.STOP)
        assert await broker.finish([FinalRecord("r", forgotten.epoch, end)]) == ["r"]
        assert await broker.append([record(owner, 3, 14)]) == []
        assert (
            await broker.finish([FinalRecord("r", owner.epoch, Delta(index=4, finish_reason=FinishReason.STOP))]) == []
        )
        log = await broker.read_log("r")
        assert [token for delta in log for token in delta.token_ids] == [11, 12, 13, 14]
