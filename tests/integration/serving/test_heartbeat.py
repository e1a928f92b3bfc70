"""The heartbeat that an engine writes to Redis while it lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.serving.reporting.heartbeat import Heartbeat

from ...processes import DEADLINE_S


@pytest.fixture
async def heartbeat(namespace: str, user_url: str) -> AsyncIterator[Heartbeat]:
    config = WorkerConfig(
        worker_id="w",
        engine_id="e0",
        redis_url="",
        engine=EngineConfig(model="m"),
        namespace=namespace,
        heartbeat_interval_s=0.02,
    )
    connection = CommandConnection(user_url)
    yield Heartbeat(config, connection)
    await connection.close()


async def test_a_refused_heartbeat_is_repeated(
    commands: CommandConnection, namespace: str, heartbeat: Heartbeat
) -> None:
    """Otherwise no client would know an engine that serves."""
    key = Keys(namespace).engine("e0")

    async def until_written() -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not await commands.execute("EXISTS", key):
                await asyncio.sleep(0.01)

    running = asyncio.create_task(heartbeat.run())
    await until_written()
    with capture_logs() as logs:
        await commands.execute("ACL", "SETUSER", namespace, "-set")
        async with asyncio.timeout(DEADLINE_S):
            while not any(event["event"] == "heartbeat_not_written" for event in logs):
                await asyncio.sleep(0.01)
        await commands.execute("DEL", key)
        await commands.execute("ACL", "SETUSER", namespace, "+set")
    await until_written()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_refused_heartbeat_fails_no_reload(
    commands: CommandConnection, namespace: str, heartbeat: Heartbeat
) -> None:
    await commands.execute("ACL", "SETUSER", namespace, "-set")
    with capture_logs() as logs:
        await heartbeat.set_model_version("two")
    assert [event["event"] for event in logs] == ["heartbeat_not_written"]
    assert heartbeat.weights_version == "two"
