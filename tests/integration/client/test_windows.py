"""A client without the modules and names that Windows lacks, against a real Redis over TCP."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.ops.lab.clusters.redis_processes import free_port
from penstock.producer import FinishReason
from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import ModelCard
from penstock.shared.keys import Keys
from penstock.shared.values.distribution import VERSION

from ...redis_server import RedisServer
from .harness import claim_one, write

RUNNER = Path(__file__).parents[2] / "without_posix.py"
IMPORTS = """
import importlib, importlib.util, pkgutil
# Jobs need the package arq, which wants an old redis-py.
has_jobs = importlib.util.find_spec("arq") is not None
for part in ("penstock.producer", "penstock.shared"):
    path = importlib.import_module(part).__path__
    for module in pkgutil.iter_modules(path, f"{part}."):
        if module.name == "penstock.producer.jobs" and not has_jobs:
            continue
        package = importlib.import_module(module.name)
        if module.ispkg:
            for inner in pkgutil.walk_packages(package.__path__, f"{module.name}."):
                importlib.import_module(inner.name)
"""
CLIENTS = """
import asyncio, sys
from penstock.producer import LLM, Client, SamplingParams

async def ask(url):
    async with Client.connect(url) as client:
        print("".join([delta.text async for delta in client.stream("hi", SamplingParams(max_tokens=2))]))
        handle = await client.submit("hi", SamplingParams(max_tokens=1))
        print((await handle.result()).text)

asyncio.run(ask(sys.argv[1]))
with LLM(sys.argv[1]) as llm:
    print(llm.generate(["hi"], SamplingParams(max_tokens=1), use_tqdm=False)[0].text)
"""
REFUSALS = """
import sys
from penstock.producer import LLM, PenstockError
for url in (None, "unix:///tmp/redis.sock"):
    try:
        LLM(url)
    except PenstockError as error:
        print(error)
sys.platform = "win32"
from penstock.worker.cli import main
print(main(["start"]))
"""

PROGRAMS = """
import sys
from penstock.ops.cli import main
from penstock.shared.values import distribution
# Linux's way to start git needs the names that are removed here.
distribution._read_commit = lambda: ""
sys.platform = "win32"
for words in (["--version"], ["--help"], ["generate", "--help"]):
    try:
        status = main(words)
    except SystemExit as leaving:
        status = leaving.code
    assert not status, words
"""


async def start(tmp_path: Path, script: str, *arguments: str) -> asyncio.subprocess.Process:
    file = tmp_path / "script.py"
    file.write_text(script)
    pipe = asyncio.subprocess.PIPE
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_REDIS_URL"}
    return await asyncio.create_subprocess_exec(
        sys.executable, str(RUNNER), str(file), *arguments, stdout=pipe, stderr=pipe, env=environment
    )


async def output_of(process: asyncio.subprocess.Process) -> list[str]:
    stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    return [*stdout.decode().splitlines(), *stderr.decode().splitlines()]


async def test_every_module_of_the_client_can_be_imported(tmp_path: Path) -> None:
    assert await output_of(await start(tmp_path, IMPORTS)) == []


@pytest.fixture
def tcp_url(tmp_path: Path) -> Iterator[str]:
    server, port = RedisServer(tmp_path / "redis"), free_port()
    server.start("--port", str(port))
    server.wait_until_ready()
    yield f"redis://127.0.0.1:{port}"
    server.kill()


async def test_clients_run(tmp_path: Path, tcp_url: str) -> None:
    connection = CommandConnection(tcp_url)
    card = ModelCard(model="m", max_model_len=1000, vocab_size=50)
    await connection.execute("HSET", Keys().models(), "m", msgspec.json.encode(card))
    broker = Broker(connection, Keys().model("m"))
    asking = await start(tmp_path, CLIENTS, tcp_url)
    first = await claim_one(broker)
    await write(broker, first, 0, 65)
    await write(broker, first, 1, 66, end=FinishReason.LENGTH)
    for token in (67, 68):
        await write(broker, await claim_one(broker), 0, token, end=FinishReason.LENGTH)
    assert await output_of(asking) == ["AB", "C", "D"]
    await connection.close()


async def test_the_program_shows_help_and_version(tmp_path: Path) -> None:
    lines = await output_of(await start(tmp_path, PROGRAMS))
    assert lines[0] == f"penstock {VERSION}"
    assert len([line for line in lines if line.startswith("usage: penstock")]) == 2


@pytest.mark.parametrize("words", ["the embedded Redis needs Linux", "no unix sockets", "the worker needs Linux"])
async def test_features_that_need_linux_raise_a_clear_error_elsewhere(tmp_path: Path, words: str) -> None:
    assert any(words in line for line in await output_of(await start(tmp_path, REFUSALS)))
