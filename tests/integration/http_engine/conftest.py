"""Servers that speak as llama-server and SGLang do, each a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.ops.lab.clusters.redis_processes import free_port
from penstock.worker.other_engines.http.server import await_server, open_client

from ...processes import DEADLINE_S

PROGRAM = Path(__file__).parent / "dialect_server.py"


class TestServer:
    """A server's controls for tests."""

    __test__ = False

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=DEADLINE_S)

    def hold_at(self, num_tokens: int | None) -> None:
        """Let no call have more tokens than this; None lets all go on."""
        self._client.post("/test/hold", json={"at": num_tokens}).raise_for_status()

    def calls(self) -> list[dict[str, Any]]:
        """Return the calls and their "end": "whole", "cut" because nobody reads it, "refused", or "open"."""
        return self._client.get("/test/calls").json()

    def ended_calls(self) -> list[dict[str, Any]]:
        """The same once none is open."""
        return self._client.get("/test/ended").raise_for_status().json()

    def close(self) -> None:
        self._client.close()


def command(port: int, dialect: str = "llama") -> list[str]:
    return [sys.executable, str(PROGRAM), "--port", str(port), "--dialect", dialect]


@contextmanager
def running_server(dialect: str) -> Iterator[TestServer]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command(port, dialect))
    try:
        with open_client(url) as client:
            await_server(client, lambda: None if process.poll() is None else "it ended")
        server = TestServer(url)
        yield server
        server.close()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server_of() -> Iterator[Callable[[str], TestServer]]:
    """Starts a server of a dialect when it is first wanted, one for all tests of a file."""
    servers: dict[str, TestServer] = {}
    with ExitStack() as stack:

        def get(dialect: str) -> TestServer:
            if dialect not in servers:
                servers[dialect] = stack.enter_context(running_server(dialect))
            return servers[dialect]

        yield get
