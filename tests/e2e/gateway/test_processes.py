"""`penstock gateway --workers 2`: real processes on one port, which die, end and count as one gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.presence import ProcessRecord, read_processes
from penstock.shared.errors import ConfigurationError
from penstock.shared.keys import Keys
from penstock.worker.processes.process_tree import is_zombie

from ...gate import Gate
from ...processes import DEADLINE_S

# They share a worker and its gate.
pytestmark = pytest.mark.xdist_group("deployment")

OPTIONS = ["--workers", "2", "--reconnect-grace", "60", "--lease-ttl", "60", "--shutdown-timeout", "60"]
NUM_TOKENS, HELD_AT = 40, 7
BODY: dict[str, Any] = {
    "prompt": "count from one to nine:",
    "temperature": 1.3,
    "seed": 5,
    "ignore_eos": True,
    "max_tokens": NUM_TOKENS,
}


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Overrides the project's: these tests look at processes, in a loop that serves no one else."""


@pytest.fixture(scope="module")
def two(deployment: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    """A gateway of two processes, which the last of its tests kills."""
    with LocalGateway(deployment.url, OPTIONS, tmp_path_factory.mktemp("two") / "gateway.log") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def counting(deployment: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    """A gateway that has counted nothing. The test after that of counts ends it."""
    with LocalGateway(deployment.url, OPTIONS, tmp_path_factory.mktemp("counting") / "gateway.log") as gateway:
        yield gateway


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.05)  # each look reads all processes of the machine


def children(gateway: LocalGateway) -> list[psutil.Process]:
    return psutil.Process(gateway.pid).children(recursive=True)


def port_of(gateway: LocalGateway) -> int:
    return int(gateway.root_url.rpartition(":")[2])


def server_of(gateway: LocalGateway, answer: httpx.Response) -> psutil.Process:
    """The process at the other end of the connection by which an answer comes."""
    stream = answer.extensions["network_stream"]
    here = stream.get_extra_info("client_addr")[1]
    (running,) = [
        child
        for child in children(gateway)
        if any(connection.raddr and connection.raddr.port == here for connection in child.net_connections("tcp"))
    ]
    return running


@asynccontextmanager
async def streaming(gateway: LocalGateway, after: str = "") -> AsyncIterator[httpx.Response]:
    headers = {"Last-Event-ID": after} if after else {}
    async with (
        httpx.AsyncClient(base_url=gateway.base_url, timeout=DEADLINE_S) as http,
        http.stream("POST", "/completions", json=BODY | {"stream": True}, headers=headers) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        yield answer


class Reading:
    """The events read of a stream, over all connections."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[str] = []
        self.is_whole = False

    async def begin(self, answer: httpx.Response) -> None:
        """Read until there is text."""
        self._lines = answer.aiter_lines()
        await self._read(lambda: bool(self.text))

    async def resume(self, answer: httpx.Response) -> None:
        """Read the events of another connection."""
        self._lines = answer.aiter_lines()
        await self.end()

    async def end(self) -> None:
        """Read the rest."""
        await self._read(lambda: False)

    async def _read(self, is_enough: Callable[[], bool]) -> None:
        event_id = ""
        async for line in self._lines:
            if line == "data: [DONE]":
                self.is_whole = True
            elif line.startswith("id: "):
                event_id = line.removeprefix("id: ")
            elif line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                self.ids.append(event_id)
                self.text += "".join(choice["text"] for choice in chunk["choices"])
            if is_enough():
                return


async def undisturbed(gateway: LocalGateway) -> str:
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=DEADLINE_S) as http:
        return (await http.post("/completions", json=BODY)).json()["choices"][0]["text"]


async def processes(deployment: LocalStack) -> list[ProcessRecord]:
    connection = CommandConnection(deployment.url)
    try:
        return await read_processes(connection.execute, Keys())
    finally:
        await connection.close()


async def test_a_stream_resumes_at_another_process_when_its_own_is_killed(
    two: LocalGateway, deployment: LocalStack, gate: Gate
) -> None:
    expected = await undisturbed(two)
    gate.hold_at(HELD_AT)
    reading = Reading()
    async with streaming(two) as answer:
        await reading.begin(answer)
        killed = server_of(two, answer)
        killed.kill()
        with pytest.raises(httpx.TransportError):
            await reading.end()
    async with streaming(two, after=reading.ids[-1]) as answer:
        assert server_of(two, answer).pid != killed.pid
        gate.open()
        await reading.resume(answer)
    assert reading.is_whole
    assert reading.text == expected
    assert len(set(reading.ids)) == len(reading.ids)
    # Another one has taken its place, and each says that it is there.
    async with asyncio.timeout(DEADLINE_S):
        while True:
            # The killed one is a child until the gateway looks after it, and its record outlives it.
            pids = {child.pid for child in children(two)}
            there = {process.pid: process for process in await processes(deployment)}
            if len(pids) == 2 and killed.pid not in pids and pids <= there.keys():
                break
            await asyncio.sleep(0.05)
    assert {(there[pid].kind, there[pid].options["process"]) for pid in pids} == {("gateway", "0"), ("gateway", "1")}
    assert '"event": "gateway_process_died"' in two.log


async def test_figures_are_those_of_all_processes_and_never_fall(counting: LocalGateway) -> None:
    callers: dict[int, httpx.AsyncClient] = {}
    num_asked = 0
    try:
        async with asyncio.timeout(DEADLINE_S):
            while len(callers) < 2:
                caller = httpx.AsyncClient(base_url=counting.root_url, timeout=DEADLINE_S)
                async with caller.stream("GET", "/version") as answer:
                    await answer.aread()
                    pid = server_of(counting, answer).pid
                num_asked += 1
                if pid in callers:
                    await caller.aclose()
                else:
                    callers[pid] = caller
        (killed, _), (_, left) = callers.items()
        for caller in callers.values():
            await until_counted(caller, num_asked, num_processes=2)
        psutil.Process(killed).kill()
        await until(lambda: {child.pid for child in children(counting)}.isdisjoint({killed}))
        await until_counted(left, num_asked, num_processes=2, num_restarts=1)
    finally:
        for caller in callers.values():
            await caller.aclose()


async def until_counted(
    caller: httpx.AsyncClient, num_asked: int, *, num_processes: int, num_restarts: int = 0
) -> None:
    """Ask until all of it is counted. An answer is counted when it has been sent, so after it was read."""
    expected = {
        'penstock_http_requests_total{method="GET",route="/version",status="200"}': num_asked,
        'penstock_http_request_duration_seconds_bucket{le="+Inf",route="/version"}': num_asked,
        "penstock_gateway_processes": num_processes,
        "penstock_gateway_process_restarts_total": num_restarts,
    }
    async with asyncio.timeout(DEADLINE_S):
        while True:
            lines = (await caller.get("/metrics")).text.splitlines()
            samples = {
                name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
            }
            values = {name: samples.get(name) for name in expected}
            assert (values["penstock_gateway_process_restarts_total"] or 0) <= num_restarts
            of_route = values['penstock_http_requests_total{method="GET",route="/version",status="200"}']
            assert of_route is None or of_route <= num_asked
            if num_restarts:
                assert of_route == num_asked
            if values == expected:
                return
            await asyncio.sleep(0.05)


async def check_stream_over_the_end(gateway: LocalGateway, gate: Gate, number: signal.Signals) -> None:
    """Check that a stream is whole though its gateway gets a signal and gives up its port meanwhile."""
    expected = await undisturbed(gateway)
    gate.hold_at(HELD_AT)
    reading, port = Reading(), port_of(gateway)
    async with streaming(gateway) as answer:
        await reading.begin(answer)
        os.kill(gateway.pid, number)
        await until(lambda: is_free(port))
        gate.open()
        await reading.end()
    assert reading.is_whole
    assert reading.text == expected


async def test_sigterm_ends_it_in_order(counting: LocalGateway, gate: Gate) -> None:
    family = children(counting)
    await check_stream_over_the_end(counting, gate, signal.SIGTERM)
    # A second signal would end it at once.
    assert await asyncio.to_thread(counting.await_end) == 0
    assert not any(child.is_running() for child in family)


def is_free(port: int) -> bool:
    """Return whether no process listens there; connections that have ended may be remembered."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
            tried.listen()
        except OSError:
            return False
    return True


def test_a_process_that_cannot_start_ends_all_with_its_sentence(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "no folder").touch()
    options = ["--workers", "2", "--files-dir", str(tmp_path / "no folder")]
    with (
        pytest.raises(ConfigurationError, match="name another with --files-dir"),
        LocalGateway(redis_url, options, tmp_path / "gateway.log"),
    ):
        pass
    lines = [json.loads(line)["event"] for line in (tmp_path / "gateway.log").read_text().splitlines()]
    # The Redis of the tests keeps nothing, which is reported as well.
    assert lines == ["redis_risk", "gateway_not_started"]


def test_the_url_of_redis_is_on_no_command_line_that_it_makes(two: LocalGateway, deployment: LocalStack) -> None:
    """The URL is not in the environment of a process either; the parent's command line is the user's."""
    assert len(children(two)) == 2
    for child in children(two):
        assert deployment.url not in " ".join(child.cmdline())
        assert deployment.url not in " ".join(child.environ().values())


async def test_children_of_a_killed_parent_give_up_the_port_and_end(two: LocalGateway, gate: Gate) -> None:
    family = children(two)
    await check_stream_over_the_end(two, gate, signal.SIGKILL)
    await until(lambda: all(map(is_zombie, family)))
