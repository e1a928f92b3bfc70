"""A POST goes to an address that was checked, or nowhere; and takes what it may take."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.producer.webhooks.delivery import ForbiddenAddressError, Reply, Sender
from penstock.producer.webhooks.settings import WebhookSettings

LOOPBACK = ("127.0.0.0/8",)


class Server:
    """Answers every connection with ``reply``, after it has read a request's head; keeps what it has read."""

    def __init__(self, reply: bytes, tls: ssl.SSLContext | None = None) -> None:
        self.heads: list[bytes] = []
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._reply = reply
        self._tls = tls

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._connections:
            writer.transport.abort()
        await asyncio.gather(*self._connections.values(), return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[writer] = task
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self._reply)
        await writer.drain()
        await reader.read()  # until the other side closes


class NameServer:
    """Plays DNS: what names resolve to, one answer after the other; addresses are left to the system."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: list[str]) -> None:
        self.num_asked = 0
        self._answers = answers
        self._resolve = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._getaddrinfo)

    def _getaddrinfo(self, host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host not in self._answers:
            return self._resolve(host, port, *args, **options)
        self.num_asked += 1
        return self._resolve(self._answers[host].pop(0), port, *args, **options)


async def post(url: str, **settings: Any) -> Reply:
    # It reads certificates from the disk, as a process does once when it starts; httpx 0.27 is seen to do so.
    sender = await asyncio.to_thread(Sender, WebhookSettings(**settings))
    try:
        return await sender.post(url, {"webhook-id": "evt_1"}, "{}", tenant="acme")
    finally:
        await sender.close()


async def test_a_private_address_gets_not_even_a_connection() -> None:
    async with Server(b"HTTP/1.1 204 No Content\r\n\r\n") as server:
        for host in ("127.0.0.1", "localhost", "2130706433", "[::ffff:127.0.0.1]"):
            with pytest.raises(ForbiddenAddressError, match="not a public address"):
                await post(f"http://{host}:{server.port}/")
        assert server.heads == []


async def test_a_name_that_changes_after_the_check_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    names = NameServer(monkeypatch, rebinding=["127.0.0.1", "127.0.0.2"])
    async with Server(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nfine") as server:
        url = f"http://rebinding:{server.port}/hook?a=b"
        assert await post(url, allowed_networks=("127.0.0.1/32",)) == Reply(200, "fine")
        (head,) = server.heads
    assert names.num_asked == 1
    assert head.startswith(b"POST /hook?a=b HTTP/1.1\r\n")
    assert f"host: rebinding:{server.port}\r\n".encode() in head.lower()


async def test_one_private_address_among_several_is_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 80)) for a in ("93.184.216.34", "10.0.0.1")],
    )
    with pytest.raises(ForbiddenAddressError, match=r"10\.0\.0\.1"):
        await post("http://mixed/")


async def test_an_answer_without_end_is_not_waited_for() -> None:
    endless = b"HTTP/1.1 500 No\r\ncontent-length: 100000000\r\n\r\n" + b"x" * 40_000
    async with Server(endless) as server:
        reply = await post(f"http://127.0.0.1:{server.port}/", allowed_networks=LOOPBACK)
    assert reply == Reply(500, "x" * 200)
    async with Server(b"HTTP/1.1 200 OK\r\n") as server:
        with pytest.raises(TimeoutError):
            await post(f"http://127.0.0.1:{server.port}/", allowed_networks=LOOPBACK, timeout_s=0.3)


async def test_a_certificate_is_the_names_not_the_addresss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=hooks.test"]
    command += ["-addext", "subjectAltName=DNS:hooks.test", "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    NameServer(monkeypatch, **{"hooks.test": ["127.0.0.1"], "other.test": ["127.0.0.1"]})
    async with Server(b"HTTP/1.1 204 No Content\r\n\r\n", tls) as server:
        reply = await post(f"https://hooks.test:{server.port}/", allowed_networks=LOOPBACK)
        assert reply.status == 204
        with pytest.raises(httpx.ConnectError, match=r"other\.test"):
            await post(f"https://other.test:{server.port}/", allowed_networks=LOOPBACK)
