"""`worker start --engine http`, twice on one queue: one engine drives a llama-server, the other an SGLang server.

Both servers compute the same function of the tokens, and are started again when they end, as a service manager would.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.ops.lab.clusters.redis_processes import free_port
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams, StructuredOutputsParams
from penstock.shared.errors import PoisonRequestError, UnsupportedParameterError, ValidationError
from penstock.worker.text.tokenizer import TextCodec

from ...faults.watching import Watched, until
from ...processes import DEADLINE_S, is_alive
from .conftest import TestServer, command
from .dialect_server import CRASH, MISTAKE
from .test_core import expected

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("http_worker")]
PROMPT = "count from four to nine:"
LONG = 60


class KeptServer:
    """A server that is started again, at the same address, whenever it has ended."""

    def __init__(self, dialect: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = command(port, dialect)
        self._is_wanted = True
        self.process = subprocess.Popen(self._command)
        self._keeping = threading.Thread(target=self._keep, daemon=True)
        self._keeping.start()

    def _keep(self) -> None:
        while self.process.wait() is not None and self._is_wanted:
            self.process = subprocess.Popen(self._command)

    def close(self) -> None:
        self._is_wanted = False
        self.process.kill()
        self._keeping.join()


class Deployment:
    """Both servers and the workers of each."""

    def __init__(self, stack: LocalStack, servers: list[KeptServer]) -> None:
        self.url = stack.url
        self.stack = stack
        self.servers = servers

    def hold_at(self, num_tokens: int | None) -> None:
        for kept in self.servers:
            server = TestServer(kept.url)
            try:
                server.hold_at(num_tokens)
            finally:
                server.close()

    def busiest(self) -> KeptServer:
        """The server with the most calls that are open."""

        def num_open(kept: KeptServer) -> int:
            server = TestServer(kept.url)
            calls = server.calls()
            server.close()
            return sum(call["end"] == "open" for call in calls)

        return max(self.servers, key=num_open)


@pytest.fixture(scope="module")
def deployment(demo_model: Path) -> Iterator[Deployment]:
    servers = [KeptServer(dialect) for dialect in ("llama", "sglang")]
    options = ["--engine", "http", "--served-model-name", "demo", "--max-deliveries", "2"]
    try:
        with LocalStack(demo_model, options, of_each=[["--engine-url", server.url] for server in servers]) as stack:
            yield Deployment(stack, servers)
    finally:
        for server in servers:
            server.close()


@pytest.fixture(scope="module")
def codec(demo_model: Path) -> TextCodec:
    return TextCodec.load(demo_model)


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[Client]:
    async with Client.connect(deployment.url) as client:
        yield client


def _params(**values: Any) -> SamplingParams:
    values = {"temperature": 0.0, "max_tokens": LONG, "ignore_eos": True, **values}
    return SamplingParams(**values)


async def _cores(client: Client, before: Collection[int] = (), num_gone: int = 0) -> set[int]:
    """Process ids of the cores of both engines, as soon as they live and so many of those before are gone."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = {engine.core_pid for engine in await client.engines() if is_alive(engine.core_pid)}
            if len(found) == 2 and len(set(before) - found) >= num_gone:
                return found
            await asyncio.sleep(0.05)


async def test_tokens_text_and_stop_strings(client: Client, codec: TextCodec) -> None:
    whole = (await client.generate(PROMPT, _params())).outputs[0]
    assert whole.token_ids == expected(codec.encode(PROMPT), LONG)
    stop = whole.text[7:10]
    cut = (await client.generate(PROMPT, _params(stop=stop))).outputs[0]
    assert (cut.text, cut.stop_reason) == (whole.text[: whole.text.index(stop)], stop)
    engines = await client.engines()
    setups = [engine.setup for engine in engines if engine.setup is not None]
    assert [(setup.engine, setup.resume) for setup in setups] == [("http", "greedy")] * 2
    assert {name for setup in setups for name in setup.versions} >= {"llama-server", "SGLang"}


async def test_unsupported_features_are_refused_by_name(client: Client) -> None:
    with pytest.raises(UnsupportedParameterError, match=r"^allowed_token_ids=\[5\] is not supported by"):
        await client.generate(PROMPT, _params(allowed_token_ids=[5]))
    with pytest.raises(UnsupportedParameterError, match=r"^resume='exact': engine 'http'"):
        await client.generate(PROMPT, _params(temperature=0.9), resume="exact")
    with pytest.raises(ValidationError, match="refuses the request: that is no bias"):
        await client.generate(PROMPT, _params(logit_bias={5: MISTAKE}))


@pytest.mark.parametrize("death", ["core", "server"])
async def test_a_death_in_mid_stream(client: Client, deployment: Deployment, death: str) -> None:
    """The stream has no gap or repeat, with a grammar too; the resuming engine appends delivered tokens to its prompt.

    The core ends with its server, and the next core waits until the server answers again. Its requests resume on the
    other server meanwhile.
    """
    asked = [_params(), _params(max_tokens=50), _params(structured_outputs=StructuredOutputsParams(json_object=True))]
    whole = [(await client.generate(PROMPT, params)).outputs[0] for params in asked]
    deployment.hold_at(20)
    watched = [Watched(client.stream(PROMPT, params)) for params in asked]
    await until(lambda: all(one.num_tokens == 20 for one in watched))
    before = await _cores(client)
    server = deployment.busiest()
    if death == "core":
        for pid in before:
            os.kill(pid, signal.SIGKILL)
    else:
        server.process.kill()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.to_thread(_let_go_on, deployment)
        await asyncio.gather(*(one.task for one in watched))
    # Those that were killed, and the one whose server was.
    await _cores(client, before, num_gone=2 if death == "core" else 1)
    for one, answer in zip(watched, whole, strict=True):
        one.check(answer)


def _let_go_on(deployment: Deployment) -> None:
    """Let them continue as soon as both servers answer."""
    while True:
        try:
            deployment.hold_at(None)
        except httpx.HTTPError:
            time.sleep(0.05)
            continue
        return


async def test_a_poisoned_request_is_parked(client: Client, deployment: Deployment) -> None:
    """The request kills a server each time until it is parked; both servers serve again afterwards."""
    whole = (await client.generate(PROMPT, _params())).outputs[0]
    with pytest.raises(PoisonRequestError):
        async with asyncio.timeout(DEADLINE_S):
            await client.generate(PROMPT, _params(logit_bias={5: CRASH}))
    async with asyncio.timeout(DEADLINE_S):
        again = (await client.generate(PROMPT, _params())).outputs[0]
    assert (again.token_ids, again.text) == (whole.token_ids, whole.text)


def test_an_engine_that_cannot_start_gives_a_reason(demo_model: Path) -> None:
    command = [sys.executable, "-m", "penstock.worker.cli", "start", "--model", str(demo_model), "--engine", "http"]
    command += ["--engine-url", "http://127.0.0.1:1", "--engines", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "engines must be 1 with engine 'http', got 2" in done.stderr
    assert "Traceback" not in done.stderr
