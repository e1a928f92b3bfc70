"""Messages to a service manager, by a socket as systemd has it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.shared.process import service_manager


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of a manager, whose address this process was given."""
    name = str(tmp_path / "notify") if request.param == "file" else f"@penstock-{os.getpid()}-{tmp_path.name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name[1:]}" if name.startswith("@") else name)
        listener.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield listener


def test_ready_and_stopping(manager: socket.socket) -> None:
    service_manager.tell_ready("ready: http://127.0.0.1:8000")
    service_manager.tell_stopping()
    assert manager.recv(1000) == b"READY=1\nSTATUS=ready: http://127.0.0.1:8000"
    assert manager.recv(1000) == b"STOPPING=1"


async def test_a_watchdog_hears_that_the_loop_turns(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "1000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    manager.setblocking(False)
    async with service_manager.watched():
        loop = asyncio.get_running_loop()
        assert [await loop.sock_recv(manager, 100) for _ in range(2)] == [b"WATCHDOG=1"] * 2


async def test_a_watchdog_of_another_process_hears_nothing(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "1000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    async with service_manager.watched():
        service_manager.tell_stopping()
    assert manager.recv(1000) == b"STOPPING=1"


def test_a_missing_service_manager_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    service_manager.tell_ready("ready")
    monkeypatch.delenv("NOTIFY_SOCKET")
    service_manager.tell_ready("ready")


def test_children_do_not_inherit_the_manager(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ANYTHING", "kept")
    inherited = service_manager.environment_of_children()
    assert "NOTIFY_SOCKET" not in inherited
    assert inherited["PENSTOCK_ANYTHING"] == "kept"
