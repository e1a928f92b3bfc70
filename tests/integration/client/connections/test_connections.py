"""Every way to reach a Redis, read by hiredis or by redis-py alone, on either event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvloop

from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.errors import RedisUnavailableError
from penstock.shared.redis_access import link as redis_link
from penstock.shared.redis_access import replies
from penstock.shared.redis_access.check import check_redis
from penstock.shared.redis_access.script import script_of

from ....processes import DEADLINE_S
from ..harness import until

NAME, PASSWORD = "app", "pass:word"
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=["hiredis", "redis-py"])
def _parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "redis-py":
        monkeypatch.setattr(replies, "hiredis", None)
        monkeypatch.setattr(redis_link, "hiredis_pack", None)


@pytest.fixture(params=sorted(LOOPS))
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[None]], None]:
    def run(work: Awaitable[None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(work)  # type: ignore[arg-type]  # a coroutine

    return run


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and a certificate for 127.0.0.1, signed by itself."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "-", "-out", "-"]
    path.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    return path


@asynccontextmanager
async def relayed(redis_url: str, context: ssl.SSLContext | None) -> AsyncIterator[int]:
    """The server of a unix socket, at a port of its own, with TLS or without."""

    relays: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        current = asyncio.current_task()
        assert current is not None
        relays.add(current)
        to_redis = await asyncio.open_unix_connection(urlsplit(redis_url).path)
        writers.extend((writer, to_redis[1]))
        await asyncio.gather(copy(reader, to_redis[1]), copy(to_redis[0], writer))
        relays.discard(current)

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.gather(*relays)


async def check_connections(url: str) -> None:
    """Commands, refusals, scripts, messages, and all of it again after the connections were lost."""
    commands, subscriber = CommandConnection(url), Subscriber(url)
    script = script_of("one", "return {1, ARGV[1]}")
    script.sha = "0" * 40  # so the server never knows it
    await asyncio.gather(commands.open(), subscriber.open())
    heard: list[bytes] = []
    restored = asyncio.Event()
    try:
        subscription = await subscriber.subscribe("news", heard.append, restored.set)
        for number in range(2):
            assert await asyncio.gather(*(commands.execute("ECHO", f"{i}") for i in range(50))) == [
                str(i).encode() for i in range(50)
            ]
            with pytest.raises(Exception, match="wrong number of arguments"):
                await commands.execute("GET")
            assert await commands.run_script(script, [], [b"\x00\xff"]) == [1, b"\x00\xff"]
            large = bytes([number]) * 3_000_000
            assert await commands.execute("PUBLISH", "news", large) == 1
            assert await commands.execute("PUBLISH", "news", "small") == 1

            async def has_heard_both(num_messages: int = 2 * number + 2) -> bool:
                return len(heard) == num_messages

            await until(has_heard_both)
            assert heard[-2:] == [large, b"small"]
            if number == 0:
                await commands.execute("CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes")
                await commands.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no")
                async with asyncio.timeout(DEADLINE_S):
                    await restored.wait()
        subscriber.unsubscribe(subscription)
    finally:
        await subscriber.close()
        await commands.close()


@pytest.mark.usefixtures("_parser")
def test_a_unix_socket(redis_url: str, run) -> None:
    run(check_connections(f"{redis_url}?db=3"))


@pytest.mark.usefixtures("_parser")
def test_tcp_with_user_and_password(redis_url: str, run) -> None:
    async def check() -> None:
        admin = CommandConnection(redis_url)
        rules = ("on", f">{PASSWORD}", "~*", "&*", "+@all")
        await admin.execute("ACL", "SETUSER", NAME, "reset", *rules)
        async with relayed(redis_url, None) as port:
            await check_connections(f"redis://{NAME}:{PASSWORD.replace(':', '%3A')}@127.0.0.1:{port}/2")
        await admin.execute("ACL", "DELUSER", NAME)
        await admin.close()

    run(check())


@pytest.mark.usefixtures("_parser")
def test_tls(redis_url: str, run, certificate: Path) -> None:
    async def check() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        async with relayed(redis_url, context) as port:
            await check_connections(f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}")

    run(check())


def test_a_certificate_of_an_unknown_authority_is_named(redis_url: str, run, certificate: Path) -> None:
    async def check() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        async with relayed(redis_url, context) as port:
            with pytest.raises(RedisUnavailableError, match=r"certificate .* is not trusted .*ssl_ca_certs"):
                await check_redis(f"rediss://127.0.0.1:{port}")

    run(check())
