"""The other side of a client: an engine played through the broker, and a Redis that can be stopped and killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import redis

from penstock.producer import Client, SamplingParams
from penstock.shared.broker import Broker, Claim, FinalRecord, Record, Room
from penstock.shared.connection import CommandConnection
from penstock.shared.embedded import find_redis_server
from penstock.shared.messages import Delta, FinishReason
from penstock.shared.records import DeathCause

# Of what takes no time on a quiet machine.
DEADLINE_S = 60.0
CAUSE = DeathCause(engine_id="e0", reason="killed by signal 9")


async def collect(client: Client, request_id: str) -> list[Delta]:
    return [delta async for delta in client.stream("hi", SamplingParams(), request_id=request_id)]


async def claim_one(broker: Broker) -> Claim:
    """Claim the next request, waiting for it to be enqueued."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            wave = (await broker.claim("e0", Room(max_num_seqs=1))).claims
            if wave:
                return wave[0]


async def write(broker: Broker, claim: Claim, index: int, *tokens: int, end: FinishReason | None = None) -> None:
    delta = Delta(index=index, token_ids=list(tokens), text="".join(map(chr, tokens)), finish_reason=end)
    if end is None:
        assert await broker.append([Record(claim.request_id, claim.epoch, delta)]) == []
    else:
        assert await broker.finish([FinalRecord(claim.request_id, claim.epoch, delta)]) == []


async def until_followed(commands: CommandConnection, broker: Broker, *claims: Claim) -> None:
    """Wait until somebody listens to the channel of each."""
    channels = [broker.keys.output(claim.request_id) for claim in claims]
    async with asyncio.timeout(DEADLINE_S):
        while (await commands.execute("PUBSUB", "NUMSUB", *channels))[1::2] != [1] * len(channels):
            await asyncio.sleep(0)


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = DEADLINE_S) -> None:
    """Poll until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.01)


async def reap_for_ever(broker: Broker) -> None:
    """What a supervisor does for one model, with short times."""
    while True:
        await broker.reap(CAUSE, max_deliveries=3, lease_ttl_ms=200)
        await asyncio.sleep(0.05)


def token_indexes(deltas: list[Delta]) -> list[int]:
    return [delta.index + k for delta in deltas for k in range(len(delta.token_ids))]


class RedisServer:
    """A redis-server with an append-only file, on a socket that outlives its process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._program = str(find_redis_server())
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{folder / 'redis.sock'}"

    def start(self, *options: str) -> None:
        """Start the server, or start it again with what it has kept; does not wait for it."""
        command = [self._program, "--port", "0", "--unixsocket", str(self._folder / "redis.sock")]
        # fsync at every write: what a client has seen is on the disk, so that the engine's next append fits.
        command += ["--save", "", "--dir", str(self._folder), "--appendonly", "yes", "--appendfsync", "always"]
        self._process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)

    def start_loading(self) -> None:
        """Start the server again with more in its file than it can load before ``finish_loading``.

        It waits a moment at each command of its file, and answers between them that it is loading.
        """
        # Redis 7 has a folder of such files.
        self._loaded = next(self._folder.glob("appendonlydir/*.incr.aof"), self._folder / "appendonly.aof")
        self._num_loaded_bytes = self._loaded.stat().st_size
        with self._loaded.open("ab") as file:
            file.write(b"*2\r\n$6\r\nSELECT\r\n$1\r\n0\r\n" * 500_000)
        self.start("--key-load-delay", "100")

    def finish_loading(self) -> None:
        """Let the server find the end of its file. (While it loads, 6.2 takes no CONFIG SET.)"""
        os.truncate(self._loaded, self._num_loaded_bytes)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert time.monotonic() < deadline, "redis-server does not answer"
                    time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
