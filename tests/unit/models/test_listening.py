"""The address at which the store of the ranks listens."""

from __future__ import annotations

import os
import socket

import psutil
import pytest
from structlog.testing import capture_logs

from penstock.ops.lab.clusters.redis_processes import free_port
from penstock.worker.models.parallel.meeting import choose_interface, listen

VARIABLE = "GLOO_SOCKET_IFNAME"


def address_of(descriptor: int) -> tuple[str, int]:
    with socket.socket(fileno=descriptor) as listener:
        host, port, *_ = listener.getsockname()
        return host, port


def test_it_listens_at_its_address_alone() -> None:
    port = free_port()
    assert address_of(listen("127.0.0.1", port)) == ("127.0.0.1", port)


def test_a_translated_address_listens_on_all_interfaces_and_is_announced() -> None:
    with capture_logs() as events:
        # Of the block that is kept for documentation: no interface has it.
        assert address_of(listen("192.0.2.1", port := free_port())) == ("0.0.0.0", port)
    assert [event["event"] for event in events] == ["group_listens_everywhere"]


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", listener.getsockname()[1])


def test_gloo_listens_on_the_interface_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    choose_interface("192.0.2.1")
    assert VARIABLE not in os.environ
    choose_interface("127.0.0.2")
    name = os.environ[VARIABLE]
    assert "127.0.0.1" in {each.address for each in psutil.net_if_addrs()[name]}
    monkeypatch.setenv(VARIABLE, "of the operator")
    choose_interface("127.0.0.1")
    assert os.environ[VARIABLE] == "of the operator"
