"""What Penstock says about a Redis that it cannot work with: real servers, made unfit in every way we know."""

from __future__ import annotations

import asyncio
import secrets
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs

from penstock.ops.lab.clusters.cluster_trio import BUS_OFFSET, PORTS
from penstock.shared.errors import ConfigurationError, RedisUnavailableError, RedisUnsupportedError
from penstock.shared.redis_access.check import check_redis
from penstock.shared.redis_access.embedded import find_redis_server
from penstock.shared.redis_access.rights import NEEDED
from penstock.shared.redis_access.url import parse_pool
from penstock.shared.values.shown import mask_url

from ...processes import DEADLINE_S

StartServer = Callable[..., str]

NUM_SLOTS = 16384
NO_INFO = "default on nopass ~* &* +@all -info"


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Start a redis-server with these options and return its URL."""
    program = find_redis_server()
    servers: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> str:
        path = tmp_path / "redis.sock"
        fixed = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(tmp_path)]
        server = subprocess.Popen([program, *fixed, *options], stdout=subprocess.DEVNULL)
        servers.append(server)
        give_up_at = time.monotonic() + 120
        while not answers(path):
            assert server.poll() is None, "redis-server died"
            assert time.monotonic() < give_up_at, "redis-server does not answer"
            time.sleep(0.005)
        return f"unix://{path}"

    yield start
    for server in servers:
        server.kill()
        server.wait()


def answers(path: Path) -> bool:
    with redis.Redis(unix_socket_path=str(path)) as client:
        try:
            return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except redis.ConnectionError:
            return False


def free_cluster_port() -> int:
    """A port that is free, as is the one by which nodes of a cluster would talk."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            port = secrets.choice(PORTS)
            with suppress(OSError):
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + BUS_OFFSET))
                return port


async def until_it_serves(client: redis.Redis) -> None:
    """Wait until a node of a cluster takes its keys."""
    async with asyncio.timeout(DEADLINE_S):
        while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def answering(reply: bytes) -> AsyncIterator[str]:
    """A TCP server that gives the same answer to everything, or none; for what no real Redis here can say."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Who leaves with answers unread resets the connection.
        with suppress(OSError):
            while commands := await reader.read(4096):
                writer.write(reply * commands.count(b"*"))
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        served.set()

    served = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await served.wait()
    finally:
        server.close()
        await server.wait_closed()


def start_with_user(start_server: StartServer, permissions: str) -> str:
    """Start a server and return the URL of a user with these permissions."""
    url = start_server("--user", "app", "on", ">pw", "resetchannels", *permissions.split())
    return url.replace("unix://", "unix://app:pw@")


async def test_fit_server_passes_and_nothing_is_written(start_server: StartServer) -> None:
    url = start_server()
    await check_redis(url, for_worker=True)
    with redis.Redis.from_url(url) as client:
        assert client.dbsize() == 0


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://:secret@localhost:1", "Connection refused"),
        ("redis://user:secret@host.invalid:6379/0", r"not known|resolution|associated"),
        ("unix:///nowhere/redis.sock", "No such file"),
    ],
)
async def test_nothing_there(url: str, reason: str) -> None:
    with pytest.raises(RedisUnavailableError, match=reason) as caught:
        await check_redis(url)
    assert "secret" not in str(caught.value)
    assert mask_url(url) in str(caught.value)
    assert "PENSTOCK_REDIS_URL" in str(caught.value)


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", "redis://u:secret@h:port", "redis://[bad"])
async def test_url_that_cannot_be_read(url: str) -> None:
    with pytest.raises(ConfigurationError, match="Redis URL") as caught:
        await check_redis(url)
    assert "secret" not in str(caught.value)


async def test_password_missing_and_wrong(start_server: StartServer) -> None:
    url = start_server("--requirepass", "right")
    with pytest.raises(RedisUnavailableError, match="refuses user or password"):
        await check_redis(url)
    with pytest.raises(RedisUnavailableError, match="refuses user or password") as caught:
        await check_redis(url.replace("unix://", "unix://:wrong@"))
    assert "wrong@" not in str(caught.value)
    await check_redis(url.replace("unix://", "unix://:right@"))


async def test_renamed_commands_are_named(start_server: StartServer) -> None:
    url = start_server("--rename-command", "XRANGE", "", "--rename-command", "EVALSHA", "")
    with pytest.raises(RedisUnsupportedError, match="lacks or denies EVALSHA, XRANGE,"):
        await check_redis(url)


async def test_denied_commands_are_named(start_server: StartServer) -> None:
    url = start_with_user(start_server, "~* &* +@all -eval -subscribe")
    with pytest.raises(RedisUnsupportedError, match="lacks or denies EVAL, SUBSCRIBE,"):
        await check_redis(url)


@pytest.mark.parametrize("permissions", ["~other:* &*", "~* &other:*"])
async def test_denied_keys_and_channels_are_named(start_server: StartServer, permissions: str) -> None:
    url = start_with_user(start_server, f"{permissions} +@all")
    with pytest.raises(RedisUnsupportedError, match="grant it ~mine:"):
        await check_redis(url, namespace="mine")


async def test_permissions_on_the_namespace_are_enough(start_server: StartServer) -> None:
    url = start_with_user(start_server, "~mine:* &mine:* +@all")
    await check_redis(url, namespace="mine")
    with pytest.raises(RedisUnsupportedError, match="~arq:"):
        await check_redis(url, namespace="mine", for_jobs=True)


@pytest.mark.parametrize("command", [*NEEDED, "SUBSCRIBE", "MULTI"])
async def test_each_command_that_is_denied_is_named(start_server: StartServer, command: str) -> None:
    url = start_with_user(start_server, f"~* &* +@all -{command.lower()}")
    with pytest.raises(RedisUnsupportedError, match=f"lacks or denies {command},"):
        await check_redis(url)


async def test_checks_leave_redis_unchanged(start_server: StartServer) -> None:
    url = start_server()
    with redis.Redis.from_url(url) as client:
        await check_redis(url, for_worker=True, for_jobs=True)
        assert client.dbsize() == 0
        info: dict[str, Any] = client.info("persistence")  # type: ignore[assignment]  # redis-py says it may be awaited
        assert info["rdb_changes_since_last_save"] == 0


async def test_forbidden_info_is_only_a_warning(start_server: StartServer) -> None:
    url = start_with_user(start_server, "~* &* +@all -info")
    with capture_logs() as logs:
        await check_redis(url, for_worker=True)
    assert [(line["event"], line["log_level"]) for line in logs] == [("redis_info_forbidden", "warning")]


async def test_eviction_stops_a_worker_and_warns_a_client(start_server: StartServer) -> None:
    url = start_server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigurationError, match="maxmemory-policy is allkeys-lru"):
        await check_redis(url, for_worker=True)
    with capture_logs() as logs:
        await check_redis(url)
    assert [line["risk"] for line in logs] == ["redis_evicts"]
    assert "noeviction" in logs[0]["reason"]


async def test_eviction_of_expiring_keys_is_a_warning(start_server: StartServer) -> None:
    """Servers that others run may have no other policy."""
    url = start_server("--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru", "--appendonly", "yes")
    with capture_logs() as logs:
        await check_redis(url, for_worker=True)
    assert [line["risk"] for line in logs] == ["redis_evicts"]
    assert "results before their time" in logs[0]["reason"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--save", ""], "every request that was accepted, and every result"),
        (["--save", "60", "1"], "what was accepted since its last copy, which it makes now and then"),
        (["--save", "60", "1", "--rename-command", "CONFIG", ""], "its last copy, or everything if it makes none"),
        (["--appendonly", "yes"], None),
    ],
)
async def test_a_worker_is_warned_of_data_that_a_restart_loses(
    start_server: StartServer, options: list[str], said: str | None
) -> None:
    url = start_server(*options)
    with capture_logs() as logs:
        await check_redis(url)
        assert logs == []
        await check_redis(url, for_worker=True)
    assert [line["risk"] for line in logs] == ([] if said is None else ["redis_not_persistent"])
    if said is not None:
        assert logs[0]["event"] == "redis_risk"
        assert f"{said}; " in logs[0]["reason"]
        assert "CONFIG SET appendonly yes" in logs[0]["reason"]


async def test_read_only_replica(start_server: StartServer) -> None:
    url = start_server("--replicaof", "127.0.0.1", "1")
    with pytest.raises(RedisUnsupportedError, match="read-only replica"):
        await check_redis(url)


@pytest.mark.parametrize(
    "owned_slots", [range(0), range(NUM_SLOTS), range(NUM_SLOTS // 3)], ids=["none", "all", "a third"]
)
async def test_any_node_of_a_cluster(start_server: StartServer, owned_slots: range) -> None:
    url = start_server("--cluster-enabled", "yes", "--port", str(free_cluster_port()))
    with redis.Redis.from_url(url) as client:
        if owned_slots:
            client.execute_command("CLUSTER", "ADDSLOTS", *owned_slots)
        if len(owned_slots) == NUM_SLOTS:
            await until_it_serves(client)
    with pytest.raises(RedisUnsupportedError, match=r"is a node of a cluster.*cluster-enabled no"):
        await check_redis(url)


async def test_cluster_that_forbids_info(start_server: StartServer) -> None:
    url = start_server("--cluster-enabled", "yes", "--port", str(free_cluster_port()), "--user", *NO_INFO.split())
    with pytest.raises(RedisUnsupportedError, match="is a node of a cluster"):
        await check_redis(url)


async def test_too_old() -> None:
    info = b"# Server\r\nredis_version:6.0.16\r\n"
    async with answering(b"$%d\r\n%s\r\n" % (len(info), info)) as url:
        with pytest.raises(RedisUnsupportedError, match=r"version 6\.0\.16; Penstock needs 6\.2"):
            await check_redis(url)


async def test_not_redis_at_all() -> None:
    async with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url:
        with pytest.raises(RedisUnavailableError, match="not Redis"):
            await check_redis(url)


async def test_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.shared.redis_access.check.CHECK_TIMEOUT_S", 0.1)
    async with answering(b"") as url:
        with pytest.raises(RedisUnavailableError, match="no answer within"):
            await check_redis(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:p%40ss@host:1/2", "redis://user:***@host:1/2"),
        ("redis://:pw@host", "redis://:***@host"),
        ("unix:///run/redis.sock?db=1&password=pw", "unix:///run/redis.sock?db=1&password=***"),
        ("redis://host", "redis://host"),
        ("redis://[bad:pw@", "redis://[bad:***@"),
        ("redis://app:Xy/Zq9@host", "redis://app:***@host"),
        ("redis://app:a@b?c#d@host/1", "redis://app:***@host/1"),
        ("redis://token@host", "redis://***@host"),
        ("redis://app:pw", "redis://***"),
        ("redis://h?password=a@b", "redis://***"),
        ("redis://h?password=a&bcde=f&db=2", "redis://h?password=***&db=2"),
        ("https://user:pw@h/v1/traces?api_key=k&x=y", "https://user:***@h/v1/traces?api_key=***"),
    ],
)
def test_password_is_masked(url: str, shown: str) -> None:
    assert mask_url(url) == shown


def test_parse_pool_opens_nothing() -> None:
    assert parse_pool("redis://host.invalid") is not None
