"""Connections that make the gateway wait: sockets that send half a request, or nothing, in their own time."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.producer.gateway.settings import GatewaySettings

from ...processes import DEADLINE_S

pytestmark = pytest.mark.xdist_group("deployment")

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
WHOLE = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
# A socket that is still open after this time fails its test.


@pytest.fixture(scope="module")
def impatient(deployment: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    """A gateway that waits for next to nothing."""
    log_path = tmp_path_factory.mktemp("impatient") / "gateway.log"
    options = ["--keep-alive-timeout", "0.2", "--request-timeout", "0.2"]
    with LocalGateway(deployment.url, options, log_path) as gateway:
        yield gateway


def connect(gateway: LocalGateway) -> closing[socket.socket]:
    address = urlsplit(gateway.root_url)
    return closing(socket.create_connection((address.hostname, address.port), timeout=DEADLINE_S))


def read_to_end(connection: socket.socket) -> bytes:
    """Read until the gateway closes the connection."""
    reply = b""
    while part := connection.recv(65536):
        reply += part
    return reply


@pytest.mark.parametrize(
    ("sent_bytes", "statuses"),
    [
        pytest.param(b"", [], id="nothing"),
        pytest.param(b"\r\n", [], id="an empty line"),
        pytest.param(b"GET /ver", [], id="half a line"),
        pytest.param(HEAD, [], id="half a head"),
        pytest.param(WHOLE + HEAD, [b"200"], id="half a second head"),
        pytest.param(WHOLE, [b"200"], id="no second request"),
        pytest.param(b"GET /version HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx", [b"200"], id="a rest"),
        pytest.param(HEAD + b"content-length: 9\r\n\r\n{", [b"408"], id="half a body"),
        pytest.param(HEAD + b"content-length: 9\r\nexpect: 100-continue\r\n\r\n", [b"100", b"408"], id="no body"),
        pytest.param(HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", [b"408"], id="half of the chunks"),
    ],
)
def test_half_requests_are_ended(impatient: LocalGateway, sent_bytes: bytes, statuses: list[bytes]) -> None:
    with connect(impatient) as connection:
        connection.sendall(sent_bytes)
        reply = read_to_end(connection)
    assert [line.split()[1] for line in reply.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")] == statuses


def test_a_second_head_sent_byte_by_byte_is_ended(impatient: LocalGateway) -> None:
    """Each byte stops uvicorn's own clock of idle connections."""
    with connect(impatient) as connection:
        connection.sendall(WHOLE)
        while b"\r\n\r\n" not in connection.recv(65536):
            pass
        connection.sendall(b"GET /")
        connection.settimeout(0.01)
        give_up_at = time.monotonic() + DEADLINE_S
        is_open = True
        while is_open and time.monotonic() < give_up_at:
            try:
                connection.sendall(b"x")
                is_open = connection.recv(65536) != b""
            except TimeoutError:
                continue
            except ConnectionError:
                is_open = False
        assert not is_open


def test_a_missing_body_is_an_error_in_openais_form(impatient: LocalGateway) -> None:
    with connect(impatient) as connection:
        connection.sendall(HEAD + b"content-length: 9\r\n\r\n{")
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"x-request-id: " in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("timeout", "request_timeout")
    assert "--request-timeout" in error["message"]
    # Logged once the answer has been sent, so maybe later than it is read.
    deadline = time.monotonic() + DEADLINE_S
    while '"status": 408' not in impatient.log:
        assert time.monotonic() < deadline, "no line tells of it"
        time.sleep(0.02)


def test_an_answer_slower_than_the_request_timeout_is_sent_whole(impatient: LocalGateway) -> None:
    """Even if half of the next request waits behind it."""
    fields = {"stream": True, "temperature": 0, "ignore_eos": True, "max_tokens": 400}
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "count:"}], **fields}).encode()
    with connect(impatient) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body + HEAD)
        reply = read_to_end(connection)
    assert reply.startswith(b"HTTP/1.1 200")
    assert reply.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_idle_connections_are_kept_for_longer_than_their_other_ends_keep_them() -> None:
    caddys_s = 120
    assert GatewaySettings(redis_url="redis://localhost").keep_alive_timeout_s > caddys_s
