"""Redis over TLS: a real server with a certificate of an authority that only the URL names."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.ops.lab.clusters.redis_processes import free_port
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.errors import RedisUnavailableError
from penstock.shared.redis_access.check import check_redis
from penstock.shared.redis_access.embedded import find_redis_server

from ....processes import DEADLINE_S


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, ``ca`` and ``other``, and a certificate of the first for this machine."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not on the PATH")
    folder = tmp_path_factory.mktemp("certificates")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    # Python 3.13 trusts no certificate without its usage.
    key += ["-addext", "keyUsage=critical,digitalSignature,keyCertSign,cRLSign"]
    for name in ("ca", "other"):
        request = ["req", "-x509", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem"]
        subprocess.run([openssl, *request], cwd=folder, check=True, capture_output=True)
    of_server = [
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
    ]
    request = ["req", "-x509", *key, *of_server, "-keyout", "server.key", "-out", "server.pem"]
    result = subprocess.run([openssl, *request], cwd=folder, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        pytest.skip(f"this openssl cannot sign so: {result.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    port = free_port()
    options = {
        "port": "0",
        "tls-port": str(port),
        "tls-cert-file": "server.pem",
        "tls-key-file": "server.key",
        "tls-ca-cert-file": "ca.pem",
        "tls-auth-clients": "no",
        "save": "",
    }
    command = [str(find_redis_server()), *(part for name, value in options.items() for part in (f"--{name}", value))]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        if not listens(server, port):
            assert server.stdout is not None
            pytest.skip(f"this redis-server speaks no TLS: {server.stdout.read().strip().splitlines()[-1]}")
        yield port
    finally:
        server.kill()
        server.communicate()


def listens(server: subprocess.Popen[str], port: int) -> bool:
    """Wait until it does, or has ended."""
    deadline = time.monotonic() + 60
    while server.poll() is None:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return True
        assert time.monotonic() < deadline, "redis-server does not answer"
        time.sleep(0.01)
    return False


async def test_both_connections_speak_it(folder: Path, port: int) -> None:
    url = f"rediss://localhost:{port}?ssl_ca_certs={folder / 'ca.pem'}"
    await check_redis(url, is_service=True)
    commands, subscriber = CommandConnection(url), Subscriber(url)
    came = asyncio.Event()
    try:
        await subscriber.open()
        await subscriber.subscribe("test:channel", lambda _: came.set())
        assert await commands.execute("PUBLISH", "test:channel", b"x" * 1_000_000) == 1
        async with asyncio.timeout(DEADLINE_S):
            await came.wait()
    finally:
        await subscriber.close()
        await commands.close()


@pytest.mark.parametrize("query", ["", "?ssl_ca_certs={folder}/other.pem"])
async def test_an_untrusted_certificate_is_refused_with_the_remedy(folder: Path, port: int, query: str) -> None:
    with pytest.raises(RedisUnavailableError, match=r"is not trusted .* \?ssl_ca_certs=FILE"):
        await check_redis(f"rediss://localhost:{port}{query.format(folder=folder)}")


async def test_a_certificate_of_another_host_is_refused(folder: Path, port: int) -> None:
    with pytest.raises(RedisUnavailableError, match=r"127\.0\.0\.1.* is not trusted"):
        await check_redis(f"rediss://127.0.0.1:{port}?ssl_ca_certs={folder / 'ca.pem'}")
