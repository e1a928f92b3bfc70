"""A real llama-server under our queue, which the worker's core starts: its tokens; our text, deaths and ends.

Skipped where there is none: ``PENSTOCK_LLAMA_SERVER`` names the program, else it is on the PATH or that of
``make engine-llama``. One deployment serves all tests of this file.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.lab.clusters.redis_processes import free_port
from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams, StructuredOutputsParams
from penstock.shared.errors import UnsupportedParameterError
from penstock.worker.text.tokenizer import TextCodec

from ..faults.watching import Watched, until
from .conftest import ROOT
from .relay import Relay

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("llama-server")]
PROMPTS = ("count from four to nine:", "what is seven plus eight?")
LONG = 60
# Some twenty of a stream's tokens; replies without a stream, as a server's health, are shorter.
HELD_BYTES = 6_000
# Numbers have limits, because a greedy demo model would write digits without end.
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMA = {"type": "object", "properties": {"n": DIGIT}, "required": ["n"], "additionalProperties": False}
SHOW_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
TOOL = {"type": "function", "function": {"name": "count", "parameters": SCHEMA, "strict": True}}
# By name, our parameters and those of llama-server itself.
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "penalties": (
        {"repetition_penalty": 1.3, "logit_bias": {17: 2.0}},
        {"repeat_penalty": 1.3, "repeat_last_n": 2048, "logit_bias": [[17, 2.0]]},
    ),
    "logprobs": ({"logprobs": 3}, {"n_probs": 3}),
}


class Deployment:
    """The worker, its server's address, and the relay between them."""

    def __init__(self, stack: LocalStack, relay: Relay, server_url: str, program: list[str]) -> None:
        self.stack = stack
        self.relay = relay
        self.server_url = server_url
        self._program = program

    def servers(self) -> list[psutil.Process]:
        """The llama-server that runs below the worker."""
        below = psutil.Process(self.stack.workers[0].pid).children(recursive=True)
        return [process for process in below if _runs(process, self._program)]


def _runs(process: psutil.Process, program: list[str]) -> bool:
    try:
        return process.cmdline()[: len(program)] == program
    except psutil.NoSuchProcess:
        return False


def _find_program() -> list[str]:
    """Return the words that run a llama-server; empty if there is none."""
    if named := os.environ.get("PENSTOCK_LLAMA_SERVER") or shutil.which("llama-server"):
        return named.split()
    python = ROOT / ".bench-peers" / "llama-server" / "bin" / "python"
    return [str(python), str(ROOT / "ops/lab/bench/peers/xllama_server.py")] if python.exists() else []


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    program = _find_program()
    if not program:
        pytest.skip("no llama-server here: run make engine-llama, or name one in PENSTOCK_LLAMA_SERVER")
    from .demo_gguf import write_demo  # it needs torch, and this file is imported without

    folder = tmp_path_factory.mktemp("llama")
    path = write_demo(folder / "demo.gguf")
    model = shutil.copytree(MODEL, folder / "model")
    template = model / "chat_template.jinja"
    template.write_text(SHOW_TOOLS + template.read_text())
    port = free_port()
    relay = Relay(port)
    command = [*program, "-m", str(path), "--host", "127.0.0.1", "--port", str(port), "-t", "1", "-tb", "1"]
    # In float32 throughout, as ours is: else near ties would go either way.
    command += ["--parallel", "4", "--no-kv-unified", "-c", "8192", "-ctk", "f32", "-ctv", "f32", "-fa", "off"]
    options = ["--engine", "http", "--engine-url", f"http://127.0.0.1:{relay.port}", "--served-model-name", "demo"]
    try:
        with LocalStack(model, [*options, "--engine-command", " ".join(command)]) as stack:
            yield Deployment(stack, relay, f"http://127.0.0.1:{port}", program)
    finally:
        relay.close()


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(MODEL)


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[Client]:
    async with Client.connect(deployment.stack.url) as client:
        yield client


def _params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": LONG, "ignore_eos": True, **values})


def _json(**values: Any) -> SamplingParams:
    return _params(structured_outputs=StructuredOutputsParams(json=SCHEMA), ignore_eos=False, **values)


@pytest.mark.parametrize("name", ASKED)
async def test_tokens_are_its_own(client: Client, deployment: Deployment, codec: TextCodec, name: str) -> None:
    ours, its = ASKED[name]
    outputs = await asyncio.gather(*(client.generate(prompt, _params(**ours)) for prompt in PROMPTS))
    async with httpx.AsyncClient(base_url=deployment.server_url, trust_env=False, timeout=300) as server:
        for prompt, request in zip(PROMPTS, outputs, strict=True):
            body = {"prompt": codec.encode(prompt), "n_predict": LONG, "temperature": 0.0, "ignore_eos": True}
            body |= {"return_tokens": True, "samplers": ["penalties", "top_k", "temperature"], **its}
            own = (await server.post("/completion", json=body)).raise_for_status().json()
            (output,) = request.outputs
            assert output.token_ids == own["tokens"]
            assert (output.text, str(output.finish_reason)) == (
                codec.decode(own["tokens"], skip_special_tokens=True),
                "length",
            )
            its_own = own["completion_probabilities"] if name == "logprobs" else []
            for position, own_position in zip(output.logprobs or [], its_own, strict=True):
                assert position.token_id == own_position["id"]
                assert position.logprob == pytest.approx(own_position["logprob"], abs=1e-4)


async def test_text_its_ends_and_grammars(client: Client) -> None:
    whole = (await client.generate(PROMPTS[0], _params())).outputs[0]
    stop = whole.text[7:10]
    cut = (await client.generate(PROMPTS[0], _params(stop=stop))).outputs[0]
    assert (cut.text, cut.stop_reason) == (whole.text[: whole.text.index(stop)], stop)
    answer = (await client.generate(PROMPTS[0], _json(max_tokens=300))).outputs[0]
    assert isinstance(json.loads(answer.text)["n"], int)
    assert str(answer.finish_reason) == "stop"
    choice = _params(structured_outputs=StructuredOutputsParams(choice=["red", "green"]), ignore_eos=False)
    assert (await client.generate(PROMPTS[0], choice)).outputs[0].text in ("red", "green")


async def test_keywords_that_no_grammar_has_do_not_end_the_grammar(client: Client) -> None:
    schema = {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    params = _params(structured_outputs=StructuredOutputsParams(json=schema), ignore_eos=False)
    assert len(json.loads((await client.generate(PROMPTS[0], params)).outputs[0].text)) == 2


def test_tools_and_formats_through_the_gateway(deployment: Deployment, tmp_path: Path) -> None:
    """Forced calls and formats are JSON grammars here, also with ``strict``."""
    with (
        LocalGateway(deployment.stack.url, [], tmp_path / "gateway.log") as gateway,
        httpx.Client(base_url=gateway.base_url, trust_env=False, timeout=300) as http,
    ):

        def choice_of(**fields: Any) -> Any:
            body = {"model": "demo", "messages": [{"role": "user", "content": PROMPTS[0]}], "temperature": 0}
            response = http.post("/chat/completions", json={**body, "max_tokens": 100, **fields})
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]

        for forced in ("required", {"type": "function", "function": {"name": "count"}}):
            (call,) = choice_of(tools=[TOOL], tool_choice=forced)["message"]["tool_calls"]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"]).keys()) == ("count", {"n"})
        # With "auto" its grammars cannot enforce ``strict``, which changes nothing then.
        function = {**TOOL["function"], "strict": False}
        free, strict = (choice_of(tools=tools) for tools in ([{**TOOL, "function": function}], [TOOL]))
        assert strict == free
        form = {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA, "strict": True}}
        assert json.loads(choice_of(response_format=form)["message"]["content"]).keys() == {"n"}
        answer = choice_of(response_format={"type": "json_object"}, max_tokens=20)
        assert answer["message"]["content"].startswith("{")


async def test_unsupported_requests_are_refused(client: Client) -> None:
    with pytest.raises(UnsupportedParameterError, match=r"^allowed_token_ids=\[5\] is not supported by"):
        await client.generate(PROMPTS[0], _params(allowed_token_ids=[5]))
    assert (await client.generate(PROMPTS[0], _params(max_tokens=2), resume="exact")).finished


async def test_the_card_describes_the_served_model(client: Client, deployment: Deployment) -> None:
    (engine,) = await client.engines()
    assert engine.setup is not None
    assert (engine.setup.engine, engine.setup.resume) == ("http", "greedy")
    assert "llama-server" in engine.setup.versions
    assert len(deployment.servers()) == 1


async def test_an_abort_frees_its_slot(client: Client, deployment: Deployment) -> None:
    deployment.relay.hold_at(HELD_BYTES)
    stream = client.stream(PROMPTS[0], _params(max_tokens=1500))
    assert (await anext(stream)).token_ids
    await stream.aclose()
    async with httpx.AsyncClient(base_url=deployment.server_url, trust_env=False, timeout=60) as server:

        async def is_any_busy() -> bool:
            return any(slot["is_processing"] for slot in (await server.get("/slots")).raise_for_status().json())

        async with asyncio.timeout(120):
            while await is_any_busy():
                await asyncio.sleep(0.05)
    deployment.relay.hold_at(None)
    assert (await client.generate(PROMPTS[0], _params(max_tokens=4))).finished


@pytest.mark.parametrize("death", ["core", "server"])
async def test_a_death_in_mid_stream(client: Client, deployment: Deployment, death: str) -> None:
    """No gap, no repeat, one end, the same tokens; a core that is killed takes the server that it started with it."""
    cases = [_params(max_tokens=200), _params(max_tokens=150), _json(max_tokens=300)]
    whole = [(await client.generate(PROMPTS[0], params)).outputs[0] for params in cases]
    deployment.relay.hold_at(HELD_BYTES)
    watched = [Watched(client.stream(PROMPTS[0], params)) for params in cases]
    await until(lambda: all(one.num_tokens >= 5 for one in watched[:2]))
    (before,) = await client.engines()
    (server,) = deployment.servers()
    os.kill(before.core_pid if death == "core" else server.pid, signal.SIGKILL)
    deployment.relay.drop()
    async with asyncio.timeout(300):
        await asyncio.gather(*(one.task for one in watched))
    for one, answer in zip(watched, whole, strict=True):
        one.check(answer)
    async with asyncio.timeout(60):
        while [engine.core_pid for engine in await client.engines()] in ([before.core_pid], []):
            await asyncio.sleep(0.05)
    assert [process.pid for process in deployment.servers()] != [server.pid]
    await until(_is_gone(server))


def _is_gone(process: psutil.Process) -> Callable[[], bool]:
    return lambda: not process.is_running()


async def test_nothing_is_left(deployment: Deployment) -> None:
    """The last test of this file: the worker ends, and its server with it."""
    family = psutil.Process(deployment.stack.workers[0].pid).children(recursive=True)
    os.kill(deployment.stack.workers[0].pid, signal.SIGTERM)
    assert await asyncio.to_thread(deployment.stack.workers[0].await_end) == 0
    # The server's keeper ends it when the core's end of a pipe is closed, which is a moment later.
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, 60)
    assert alive == []
