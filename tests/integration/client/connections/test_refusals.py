"""A server that is there and refuses: a wrong or missing password, a disk on which it cannot save."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
from structlog.testing import capture_logs

from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.redis_access import link

from ....processes import DEADLINE_S
from ....redis_server import RedisServer

# In the time that as many attempts take at a server that closes each connection, a refused login is not repeated.
NUM_OTHER_ATTEMPTS = 20
# They are sent in one go, and each may be refused.
NUM_COMMANDS = 5


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


@pytest.fixture
async def attempts(tmp_path: Path) -> AsyncIterator[asyncio.Semaphore]:
    """Released at each attempt of another connection, to a server that closes it at once."""
    accepted = asyncio.Semaphore(0)

    def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.release()
        writer.close()

    path = str(tmp_path / "closing.sock")
    async with await asyncio.start_unix_server(close, path):
        other = CommandConnection(f"unix://{path}", retry_for_s=math.inf)
        trying = asyncio.create_task(other.execute("PING"))
        yield accepted
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
        await other.close()


def refusals(server: RedisServer) -> int:
    """Return how many logins, and commands without one, the server has refused."""
    with redis.Redis.from_url(server.url, password="right") as client:
        stats = client.info("errorstats")
    assert isinstance(stats, dict)
    return sum(stats.get(f"errorstat_{code}", {}).get("count", 0) for code in ("WRONGPASS", "NOAUTH"))


@pytest.mark.parametrize("url_end", ["?password=wrong", ""])
@pytest.mark.parametrize("is_subscriber", [False, True])
async def test_a_refused_login_is_not_repeated_at_once(
    server: RedisServer,
    attempts: asyncio.Semaphore,
    monkeypatch: pytest.MonkeyPatch,
    url_end: str,
    is_subscriber: bool,
) -> None:
    monkeypatch.setattr(link, "LOGIN_PAUSE_S", 600.0)
    server.start("--requirepass", "right")
    await asyncio.to_thread(server.wait_until_ready)
    url = server.url + url_end
    if is_subscriber:
        subscriber = Subscriber(url)
        trying = asyncio.create_task(subscriber.open())
        closing = subscriber.close
    else:
        commands = CommandConnection(url, retry_for_s=math.inf)
        trying = asyncio.gather(*(commands.execute("SET", "key", "value") for _ in range(NUM_COMMANDS)))
        closing = commands.close
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await asyncio.to_thread(refusals, server):
                await asyncio.sleep(0.01)
            for _ in range(NUM_OTHER_ATTEMPTS):
                await attempts.acquire()
        assert await asyncio.to_thread(refusals, server) < NUM_OTHER_ATTEMPTS
    finally:
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
        await closing()


async def test_a_server_that_cannot_save_delivers_messages(server: RedisServer, tmp_path: Path) -> None:
    """The server refuses PINGs as it refuses writes."""
    folder = tmp_path / "gone"
    await asyncio.to_thread(folder.mkdir)
    server.start("--appendonly", "no", "--dir", str(folder))
    await asyncio.to_thread(server.wait_until_ready)
    await asyncio.to_thread(_break_disk, server, folder)
    subscriber, messages = Subscriber(server.url), asyncio.Queue[bytes]()
    with capture_logs() as logs:
        await subscriber.open()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await subscriber.subscribe("channel", messages.put_nowait)
                while not await asyncio.to_thread(_num_refused_pings, server):
                    await asyncio.sleep(0.01)
                for number in range(3):
                    assert await asyncio.to_thread(server.execute, "PUBLISH", "channel", number) == 1
                    assert await messages.get() == b"%d" % number
        finally:
            await subscriber.close()
    assert [entry["event"] for entry in logs if entry["log_level"] != "debug"] == []


def _break_disk(server: RedisServer, folder: Path) -> None:
    """Remove the server's folder, and wait until a save has failed."""
    server.execute("CONFIG", "SET", "save", "1 1")
    folder.rmdir()
    server.execute("SET", "key", "value")
    with redis.Redis.from_url(server.url) as client:
        while client.info("persistence")["rdb_last_bgsave_status"] != "err":  # type: ignore[index]  # redis-py says it may be awaited
            try:
                client.bgsave()
            except redis.ResponseError:
                continue  # one is under way, or cannot begin


def _num_refused_pings(server: RedisServer) -> int:
    with redis.Redis.from_url(server.url) as client:
        stats = client.info("errorstats")
    assert isinstance(stats, dict)
    return stats.get("errorstat_MISCONF", {}).get("count", 0)
