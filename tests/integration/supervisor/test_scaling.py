"""More engines and fewer while a supervisor serves. Stub workers; see ``stub_host``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.producer import Client
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.presence import ProcessKind, read_processes
from penstock.shared.errors import ValidationError
from penstock.shared.keys import Keys
from penstock.shared.process import children
from penstock.worker import cli as worker_cli
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.supervisor import supervisor
from penstock.worker.supervisor.engine_process import EngineProcess
from penstock.worker.supervisor.restart import CRASH_LOOP_LIMIT, Phase

from ...processes import is_gone
from .stub_host import StubHost, eventually, use_stub_workers

MOST = 4
StartHost = Callable[..., Awaitable[StubHost]]


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Overrides the project's: as in ``test_restarts``."""


@pytest.fixture
async def start_host(
    commands: CommandConnection, redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StartHost]:
    use_stub_workers(monkeypatch, tmp_path)
    hosts: list[StubHost] = []

    async def start(num_engines: int, **config: object) -> StubHost:
        config = {"redis_url": redis_url, "namespace": namespace, "heartbeat_interval_s": 0.1, **config}
        hosts.append(StubHost(commands, tmp_path, num_engines, config, max_engines=MOST))
        await hosts[-1].until_ready()
        return hosts[-1]

    yield start
    for host in hosts:
        await host.destroy()


def phases(host: StubHost) -> list[Phase]:
    return [engine.policy.phase for engine in host.engines]


async def until_phases(host: StubHost, *wanted: Phase) -> None:
    await eventually(lambda: phases(host) == list(wanted))


async def test_up_down_and_up_again(start_host: StartHost, commands: CommandConnection, namespace: str) -> None:
    host = await start_host(1)
    first = host.process(0)
    await host.scale(3)
    await until_phases(host, *[Phase.SERVING] * 3)
    last = [host.process(1), host.process(2)]
    await host.scale(1)
    await until_phases(host, Phase.SERVING, Phase.LEFT, Phase.LEFT)
    assert all(is_gone(process) for process in last)
    assert not is_gone(first)
    assert host.engines[1].heartbeat_unless_left() is None
    await host.scale(2)
    await until_phases(host, Phase.SERVING, Phase.SERVING, Phase.LEFT)
    assert [engine.engine_id for engine in host.engines] == ["h-0", "h-1", "h-2"]
    assert host.process(0) == first
    (record,) = [
        one for one in await read_processes(commands.execute, Keys(namespace)) if one.kind == ProcessKind.SUPERVISOR
    ]
    assert record.options["max_engines"] == str(MOST)
    await host.drain()
    assert await host.result() is True


async def test_requests_of_an_engine_that_ignores_its_stop_are_reclaimed(
    start_host: StartHost, commands: CommandConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drain the engine, then request a release, then kill it; a later resize waits for none of these steps.

    The death counts for no request, even one without a token, however short the time limits are.
    """
    monkeypatch.setattr("penstock.worker.supervisor.scaling.HAND_BACK_TIMEOUT_S", 0.0)
    monkeypatch.setattr(supervisor, "DRAIN_MARGIN_S", 0.0)
    host = await start_host(1, drain_timeout_s=0.0)
    host.tell(1, "stubborn")
    await host.scale(2)
    await until_phases(host, Phase.SERVING, Phase.SERVING)
    await host.claim(1)
    stubborn = host.process(1)
    host.tell(1, "serve")
    await host.scale(1)
    await until_phases(host, Phase.SERVING, Phase.LEFT)
    assert is_gone(stubborn)
    assert await host.broker.state("r") == "queued"
    assert await commands.execute("HGET", host.broker.keys.request("r"), "deaths") is None
    await host.scale(2)
    await until_phases(host, Phase.SERVING, Phase.SERVING)


async def test_one_that_cannot_start_is_tried_again_and_the_others_serve_on(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "FIRST_DELAY_S", 0.001)
    host = await start_host(1)
    is_buried, gone = asyncio.Event(), EngineProcess.gone

    async def gone_late(life: EngineProcess) -> None:
        if host.engines[1].policy.phase is Phase.GIVEN_UP:
            await is_buried.wait()
        await gone(life)

    monkeypatch.setattr(EngineProcess, "gone", gone_late)
    host.tell(1, "refuse")
    await host.scale(2)
    await until_phases(host, Phase.SERVING, Phase.GIVEN_UP)
    given_up = host.engines[1]
    assert given_up.policy.num_barren_deaths == CRASH_LOOP_LIMIT
    host.tell(1, "serve")
    await host.scale(2)
    await eventually(lambda: host.engines[1] is not given_up)
    is_buried.set()
    await until_phases(host, Phase.SERVING, Phase.SERVING)


async def test_nonsense_is_refused_before_anything_is_sent(
    start_host: StartHost, redis_url: str, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    host = await start_host(1)
    async with Client.connect(redis_url, namespace=namespace) as client:
        with pytest.raises(ValidationError, match=f"at most {MOST}, for which worker h has room"):
            await client.scale_worker("h", MOST + 1)
        with pytest.raises(ValidationError, match="num_engines must be a number of at least 1, got 0; stop the worker"):
            await client.scale_worker("h", 0)
        with pytest.raises(ValidationError, match="worker_id must be one of h, got 'g'"):
            await client.scale_worker("g", 1)
    status = await asyncio.to_thread(
        worker_cli.main, ["scale", "h", "9", "--redis-url", redis_url, "--namespace", namespace]
    )
    assert status == 1
    assert f"at most {MOST}" in capsys.readouterr().err
    await host.scale(MOST + 1)
    await host.scale(2)
    await until_phases(host, Phase.SERVING, Phase.SERVING)


async def test_ranks_of_a_group_are_not_scaled_one_by_one(
    start_host: StartHost, redis_url: str, namespace: str
) -> None:
    ranks = EngineConfig(model="demo", data_parallel_size=2, data_parallel_group="g", data_parallel_address="127.0.0.1")
    host = await start_host(1, engine=ranks)
    refusal = "worker h has ranks of the data-parallel group g, .*; call scale_elastic_ep"
    async with Client.connect(redis_url, namespace=namespace) as client:
        with pytest.raises(ValidationError, match=refusal):
            await client.scale_worker("h", 2)
    # A client of another version asks the supervisor all the same.
    with capture_logs() as told:
        await host.scale(2)
        await eventually(lambda: "scale_refused" in [entry["event"] for entry in told])
    assert phases(host) == [Phase.SERVING]
