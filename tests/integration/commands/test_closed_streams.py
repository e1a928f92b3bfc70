"""Services whose standard streams are closed, or read by nobody, as they are under some supervisors and cron."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.presence import read_processes
from penstock.shared.keys import Keys

from ..jobs.processes import until

pytestmark = pytest.mark.slow

SERVICES = {
    "gateway": ["gateway", "--port", "0"],
    "gateways": ["gateway", "--port", "0", "--workers", "2"],
    "dashboard": ["dashboard", "--port", "0"],
    "jobs": ["jobs"],
}


def close(*numbers: int) -> Callable[[], None]:
    """Run in the child before its program."""

    def closing() -> None:
        for number in numbers:
            os.close(number)

    return closing


async def serves_until_it_is_told(process: subprocess.Popen[Any], commands: CommandConnection, namespace: str) -> None:
    async def is_there() -> bool:
        assert process.poll() is None, f"it ended with {process.returncode}"
        return bool(await read_processes(commands.execute, Keys(namespace)))

    await until(is_there, "it does not serve")
    process.send_signal(signal.SIGTERM)
    # It says that it is there shortly before it handles signals.
    assert await asyncio.to_thread(process.wait, 200) in (0, -signal.SIGTERM)


def start(service: str, redis_url: str, namespace: str, folder: Path, **options: Any) -> subprocess.Popen[Any]:
    if service == "jobs":
        pytest.importorskip("arq")
    command = [sys.executable, "-m", "penstock.ops.cli", *SERVICES[service], "--redis-url", redis_url]
    command += ["--namespace", namespace]
    return subprocess.Popen(command, env=os.environ | {"PENSTOCK_FILES_DIR": str(folder)}, **options)


@pytest.mark.parametrize("numbers", [(2,), (0, 1, 2)], ids=["stderr", "all"])
@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_with_closed_streams_serves(
    service: str, numbers: tuple[int, ...], redis_url: str, namespace: str, commands: CommandConnection, tmp_path: Path
) -> None:
    with start(service, redis_url, namespace, tmp_path, preexec_fn=close(*numbers)) as process:
        await serves_until_it_is_told(process, commands, namespace)


@pytest.mark.parametrize(("service", "output"), [("gateways", "left"), ("dashboard", "left"), ("dashboard", "full")])
async def test_a_service_serves_with_closed_or_full_output(
    service: str, output: str, redis_url: str, namespace: str, commands: CommandConnection, tmp_path: Path
) -> None:
    if output == "full":
        number = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, number = os.pipe()
        os.close(reading)
    with start(service, redis_url, namespace, tmp_path, stdout=number, stderr=number) as process:
        os.close(number)
        await serves_until_it_is_told(process, commands, namespace)
