"""`worker start --metrics-port`: figures and probes of a host's engines, with Redis and without. Stub workers."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from penstock.shared.connection import CommandConnection
from penstock.shared.errors import ConfigurationError
from penstock.shared.process import children
from penstock.worker.supervisor import host_metrics
from penstock.worker.supervisor.host_metrics import MetricsServer

from ...processes import DEADLINE_S
from ...redis_server import RedisServer
from .stub_host import StubHost, eventually, use_stub_workers, wait_for_redis

TOKENS = 'vllm:generation_tokens_total{{engine="name-{}",model_name="demo"}} 77.0'


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Overrides the project's: a supervisor spawns processes and reads /proc in its loop, which serves nobody else."""


@pytest.fixture
async def http(metrics: MetricsServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=metrics.url, timeout=DEADLINE_S) as http:
        yield http


@pytest.fixture
def metrics() -> MetricsServer:
    return MetricsServer("127.0.0.1", 0, "vllm")


@pytest.fixture
async def host(
    server: RedisServer, metrics: MetricsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StubHost]:
    use_stub_workers(monkeypatch, tmp_path)
    # What does not answer is only slow, but where a test says otherwise.
    monkeypatch.setattr(host_metrics, "REDIS_PATIENCE_S", 60.0)
    monkeypatch.setattr(host_metrics, "LOOP_PATIENCE_S", 60.0)
    commands = CommandConnection(server.url)
    config = {"redis_url": server.url, "namespace": "n", "heartbeat_interval_s": 0.1}
    host = StubHost(commands, tmp_path, 2, config, metrics)
    await host.until_ready()
    yield host
    await host.destroy()
    await asyncio.to_thread(metrics.close)
    await commands.close()


async def until_told(http: httpx.AsyncClient, *lines: str) -> None:
    async def is_told() -> bool:
        told = (await http.get("/metrics")).text.splitlines()
        return all(line in told for line in lines)

    await eventually(is_told)


async def test_each_engine_has_metrics_while_redis_is_away(
    host: StubHost, http: httpx.AsyncClient, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [TOKENS.format(0), TOKENS.format(1), 'penstock_engine_up{engine="name-0",model_name="demo"} 1.0']
    await until_told(http, *lines)
    text = (await http.get("/metrics")).text
    assert text.count("\nvllm:generation_tokens_total{") == 2, "one writer for each engine"
    assert 'engine_id="h-0"' in text, "which process it is can be found"
    assert (await http.get("/readyz")).status_code == 200
    server.kill()
    monkeypatch.setattr(host_metrics, "REDIS_PATIENCE_S", 1.0)
    wait_for_redis(monkeypatch, 1.0)
    ready = await http.get("/readyz")
    assert (ready.status_code, "Redis cannot be used" in ready.json()["error"]) == (503, True)
    assert (await http.get("/healthz")).json() == {"status": "ok"}
    await until_told(http, *lines)


async def test_an_engine_that_is_down_is_named_and_not_ready(
    host: StubHost, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "FIRST_DELAY_S", 0.1)
    monkeypatch.setattr(children, "MAX_DELAY_S", 0.1)
    host.tell(1, "load")  # its next life never gets ready
    host.process(1).kill()
    await eventually(lambda: host.engines[1].policy.num_restarts > 0)
    ready = await http.get("/readyz")
    assert ready.status_code == 503
    assert ready.json()["error"].startswith("engine h-1 is ")
    up = 'penstock_engine_up{{engine="name-{}",model_name="demo"}} {}'
    await until_told(http, up.format(0, "1.0"), up.format(1, "0.0"), TOKENS.format(0))


async def test_a_draining_worker_is_healthy_but_not_ready(host: StubHost, http: httpx.AsyncClient) -> None:
    for index in range(2):
        host.tell(index, "stubborn")
        host.process(index).kill()
        await host.until_restarted(index)
    await host.drain()
    await eventually(lambda: host.supervisor._stop_mode > 0)
    ready = await http.get("/readyz")
    assert (ready.status_code, ready.json()) == (503, {"error": "the worker is draining"})
    assert (await http.get("/healthz")).status_code == 200
    for index in range(2):
        host.process(index).kill()
    await host.result()


async def test_a_blocked_event_loop_makes_the_worker_unhealthy(
    host: StubHost, metrics: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_metrics, "LOOP_PATIENCE_S", 0.2)
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(httpx.get(f"{metrics.url}/healthz", timeout=DEADLINE_S)))
    asking.start()
    asking.join()  # the loop stands still meanwhile
    assert answers[0].status_code == 503
    assert "event loop" in answers[0].json()["error"]


async def test_paths_that_are_not_there(host: StubHost, http: httpx.AsyncClient) -> None:
    answer = await http.get("/metric")
    assert answer.status_code == 404
    assert answer.json()["error"] == "no path '/metric'; available: /metrics, /healthz, /readyz"
    assert (await http.head("/metrics")).content == b""
    assert (await http.post("/metrics")).status_code == 501


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"--metrics-port {port} \(Address already in use\); pass"):
            MetricsServer("127.0.0.1", port, "penstock")
