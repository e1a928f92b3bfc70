"""What our servers take of a request before anybody is asked who they are: real processes, and raw sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from penstock.ops.local.server import LocalServer
from penstock.producer.web.connection import MAX_HEAD_BYTES

from ...processes import DEADLINE_S

# A socket that is still open after this time fails its test.
LARGE = b"x" * (4 * MAX_HEAD_BYTES)
BEGIN = b"POST /login HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = BEGIN + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n"


@pytest.fixture(scope="module", params=["gateway", "dashboard"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    redis_url = request.getfixturevalue("redis_url")
    folder = tmp_path_factory.mktemp("server")
    options = {"gateway": ["--files-dir", str(folder / "files"), "--api-keys", "on"], "dashboard": ["--keys", "on"]}
    with LocalServer(request.param, redis_url, options[request.param], folder / "log") as server:
        yield server


def connect(server: LocalServer) -> closing[socket.socket]:
    address = urlsplit(server.base_url)
    return closing(socket.create_connection((address.hostname, address.port), timeout=DEADLINE_S))


def read_to_end(connection: socket.socket) -> bytes:
    answer = b""
    while part := connection.recv(65536):
        answer += part
    return answer


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"GET /" + LARGE, id="line"),
        pytest.param(b"GET /?a=" + LARGE + b" HTTP/1.1\r\n", id="query"),
        pytest.param(BEGIN + b"a: " + LARGE, id="value"),
        pytest.param(BEGIN + LARGE, id="name"),
        pytest.param(BEGIN + b"a: b\r\n" * (4 * MAX_HEAD_BYTES // 6), id="many headers"),
        pytest.param(b"\r\n" * (2 * MAX_HEAD_BYTES), id="empty lines"),
    ],
)
def test_a_large_head_is_answered_before_it_is_whole(server: LocalServer, head: bytes) -> None:
    """None of these heads ends, so a server that gathers all of it would never answer."""
    with connect(server) as connection:
        connection.sendall(head)
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close\r\n" in answer
    assert answer.endswith(b"at most 65536 bytes\n")


@pytest.mark.parametrize("num_bytes", [1, MAX_HEAD_BYTES - 1024])
def test_a_head_within_the_limit_is_served_also_in_small_pieces(server: LocalServer, num_bytes: int) -> None:
    head = b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\na: " + b"x" * num_bytes + b"\r\n\r\n"
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(head), 1000):
            connection.sendall(head[start : start + 1000])
        assert read_to_end(connection).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"1;" + LARGE, id="extension of a chunk"),
        pytest.param(b"1;a=b\r\nx\r\n0;" + LARGE, id="extension of the last chunk"),
        pytest.param(b"0\r\na: " + LARGE, id="trailer"),
        pytest.param(b"0\r\n" + b"a: b\r\n" * (4 * MAX_HEAD_BYTES // 6), id="many trailers"),
        pytest.param(b"0" * len(LARGE), id="size"),
    ],
)
def test_endless_chunk_framing_is_bounded(server: LocalServer, body: bytes) -> None:
    """None of these bodies ends. The answer to the head may arrive before the connection ends."""
    with connect(server) as connection:
        try:
            connection.sendall(CHUNKED + body)
            answer = read_to_end(connection)
        except ConnectionError:
            answer = b""
    assert answer == b"" or answer.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 404 "))


def test_a_body_of_many_small_chunks_is_taken(server: LocalServer) -> None:
    """Their sizes are several times as long as they are, and longer than a head may be."""
    body = b"1\r\nx\r\n" * (MAX_HEAD_BYTES // 3) + b"0\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(CHUNKED + body + b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert read_to_end(connection).count(b"HTTP/1.1 401 ") == 2
