"""A model that pools through client, Redis, worker process and engine core, and over HTTP."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.ops import demo
from penstock.ops.demo.run import MODEL
from penstock.ops.demo.task import number_words
from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.ops.local.worker import LocalWorker
from penstock.producer import LLM, Client, DataPrompt, Delta, PoolingParams, PoolingRequestOutput, SamplingParams
from penstock.shared import errors
from penstock.shared.broker import Broker, RequestFilter
from penstock.shared.keys import Keys

from ... import io_processors
from ...gate import Gate
from ...io_processors import Broken, Nearest
from ...processes import DEADLINE_S

MODEL_DIR = Path(demo.__file__).parent / "embedder"
TOKEN_IDS = [[1, 22, 18, 25], [1, 19, 20]]  # of "407" and "12"
THING: dict[str, Any] = {"thing": "407", "names": ["seventy four", "four hundred seven", "three"]}
TEXTS = [f"{number_words(number)} and {number}" for number in range(0, 9000, 30)]


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    options = ["--device", "cpu", "--threads", "1", "--served-model-name", "numbers", "--max-num-seqs", "16"]
    # Who stops a core here says when it is killed.
    options += ["--stall-timeout", "300"]
    with LocalStack(MODEL_DIR, options) as stack:
        yield stack


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[Client]:
    async with Client.connect(stack.url, model="numbers") as client:
        yield client


async def test_many_texts_in_one_call_are_embedded_each_as_alone(client: Client) -> None:
    outputs = await client.embed(TEXTS)
    alone = await client.encode(TEXTS[217])
    assert [output.prompt for output in outputs] == TEXTS
    assert outputs[217].outputs.embedding == pytest.approx(alone.outputs.vector, abs=1e-5)
    assert sum(x * x for x in alone.outputs.vector) == pytest.approx(1, abs=1e-5)
    assert alone.usage is not None
    assert (alone.usage.num_prompt_tokens > 5, alone.usage.num_output_tokens) == (True, 0)
    card = await client.get_model_config()
    assert card.supported_tasks == ("embed", "token_embed")
    (same, other) = await client.score("407", ["four hundred seven", "four hundred seventy"])
    assert same.outputs.score > max(0.9, other.outputs.score)


async def test_requests_of_a_killed_engine_are_pooled_once(client: Client, stack: LocalStack) -> None:
    expected = {text: output.outputs.embedding for text, output in zip(TEXTS, await client.embed(TEXTS), strict=True)}
    (before,) = await client.engines()
    # It claims, and then gives nothing.
    os.kill(before.core_pid, signal.SIGSTOP)
    handles = await client.submit_many(TEXTS, PoolingParams(task="embed"))
    async with asyncio.timeout(DEADLINE_S):
        while (await client.queue_stats()).num_running < 16:
            await asyncio.sleep(0.02)
    os.kill(before.core_pid, signal.SIGKILL)
    results = await asyncio.gather(*(handle.result() for handle in handles))
    broker = Broker(client._commands, Keys().model("numbers"))
    for text, handle, result in zip(TEXTS, handles, results, strict=True):
        assert result.pooled is not None
        assert result.pooled.vector == pytest.approx(expected[text], abs=1e-5)
        assert len(await broker.read_log(handle.request_id)) == 1
    attempts = [result.outputs[0].stats.num_deliveries for result in results if result.outputs[0].stats is not None]
    assert len(attempts) == len(TEXTS)
    assert sum(attempts) > len(TEXTS)


async def test_one_text_is_one_prompt_and_the_wrong_one_of_several_is_named(client: Client) -> None:
    """A text is a sequence of letters, too."""
    (only,) = await client.encode_all("407")
    (same,) = await client.submit_many("407", PoolingParams())
    assert (await same.result()).pooled == only.pooled
    for work in (client.encode_all(["407", ""]), client.submit_many(["407", ""], PoolingParams())):
        with pytest.raises(errors.ValidationError, match=r"^prompt\[1\] must not be empty"):
            await work


async def test_a_step_by_hand_returns_pooling_outputs(client: Client, stack: LocalStack) -> None:
    (expected,) = await client.encode_all("407")

    def step_by_hand() -> list[object]:
        outputs: list[object] = []
        with LLM(stack.url, model="numbers") as llm:
            llm.add_request("pooled-by-hand", "407", PoolingParams())
            while llm.has_unfinished_requests():
                outputs += llm.step()
        return outputs

    (output,) = await asyncio.to_thread(step_by_hand)
    assert isinstance(output, PoolingRequestOutput)
    assert (output.request_id, output.prompt, output.pooled) == ("pooled-by-hand", "407", expected.pooled)


async def test_a_known_request_id_gives_the_stored_result(client: Client) -> None:
    first, again = [await client.encode_all(TEXTS[:3], request_id="known") for _ in range(2)]
    assert [output.request_id for output in first] == ["known-0", "known-1", "known-2"]
    assert [output.pooled for output in first] == [output.pooled for output in again]


async def test_an_io_processor_turns_data_into_prompts_and_results_into_an_answer(stack: LocalStack) -> None:
    async with Client.connect(stack.url, model="numbers", io_processors=[Nearest(), Broken()]) as client:
        output = await client.encode(DataPrompt(THING, "nearest"), PoolingParams(dimensions=64), request_id="near")
        assert (output.request_id, output.outputs["of"], output.outputs["name"]) == ("near", "near", THING["names"][1])
        assert (output.prompt, output.model) == (DataPrompt(THING, "nearest"), "numbers")
        expected = await client.encode_all([THING["thing"], *THING["names"]], PoolingParams(dimensions=64))
        counts = [one.usage.num_prompt_tokens for one in expected if one.usage is not None]
        assert output.usage is not None
        assert output.usage.num_prompt_tokens == sum(counts)
        again = await client.encode(DataPrompt(THING, "nearest"), PoolingParams(dimensions=64), request_id="near")
        assert again.outputs == output.outputs
        with pytest.raises(errors.RequestFailedError, match="raised KeyError in post_process"):
            await client.encode(DataPrompt({"how": "post:key"}, "broken"))
        with pytest.raises(errors.PromptTooLongError, match="but max_model_len is 64"):
            await client.encode(DataPrompt({"thing": "four " * 90, "names": ["a"]}, "nearest"))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with I/O processors, for processes that are started now."""
    (tmp_path / "my_data.py").write_text(Path(io_processors.__file__).read_text())
    folder = tmp_path / "my_data-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: my-data\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[penstock.io_processors]\nnearest_names = my_data:Nearest\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_the_gateway_answers_as_openai_jina_and_vllm_do(stack: LocalStack, tmp_path: Path, installed: None) -> None:
    named = ["--model", "numbers", "--io-processor", "nearest_names", "--io-processor", "my_data:Broken"]
    with (
        LocalGateway(stack.url, named, tmp_path / "gateway.log") as gateway,
        openai.OpenAI(base_url=gateway.base_url, api_key="-", max_retries=0) as sdk,
        httpx.Client(base_url=gateway.base_url.removesuffix("/v1"), timeout=DEADLINE_S) as http,
    ):
        answer = sdk.embeddings.create(model="numbers", input=["407", "12"])  # base64 on the wire
        floats = sdk.embeddings.create(model="numbers", input=TOKEN_IDS, encoding_format="float")
        for one, other in zip(answer.data, floats.data, strict=True):
            assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, TOKEN_IDS))
        assert len(sdk.embeddings.create(model="numbers", input="1", dimensions=8).data[0].embedding) == 8
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.embeddings.create(model="numbers", input="1", dimensions=99)
        assert caught.value.param == "dimensions"
        with pytest.raises(openai.BadRequestError, match="does not generate; its tasks: embed, token_embed"):
            sdk.completions.create(model="numbers", prompt="1")
        long = {"model": "numbers", "input": [[*TOKEN_IDS[1], *TOKEN_IDS[0]]], "encoding_format": "float"}
        cut = http.post("/v1/embeddings", json={**long, "truncate_prompt_tokens": len(TOKEN_IDS[0])}).json()
        assert cut["data"][0]["embedding"] == pytest.approx(floats.data[0].embedding, abs=1e-5)
        refused = http.post("/v1/embeddings", json={**long, "truncate_prompt_tokens": 0})
        assert refused.json()["error"]["param"] == "truncate_prompt_tokens"
        documents = ["seventy four", "four hundred seven", "three"]
        ranked = http.post("/rerank", json={"query": "407", "documents": documents, "top_n": 2}).json()
        assert (ranked["results"][0]["index"], ranked["results"][0]["document"]) == (1, {"text": "four hundred seven"})
        assert ranked["results"][0]["relevance_score"] > 0.9
        assert len(ranked["results"]) == 2
        scores = http.post("/v1/score", json={"text_1": "407", "text_2": documents}).json()["data"]
        assert scores[1]["score"] > 0.9
        tokens = http.post("/pooling", json={"input": "407", "task": "token_embed", "encoding_format": "base64"})
        data = base64.b64decode(tokens.json()["data"][0]["data"])
        assert len(struct.unpack(f"<{len(data) // 4}f", data)) == len(TOKEN_IDS[0]) * 96
        too_long = "four " * 90
        for path, body, param in (
            ("/v1/embeddings", {"input": ["1", too_long]}, "input[1]"),
            ("/v1/embeddings", {"input": "1", "prompt_name": "query"}, "prompt_name"),
            ("/rerank", {"query": "407", "documents": [*documents, too_long]}, "documents[3]"),
            ("/rerank", {"query": too_long, "documents": documents}, "query"),
            ("/v1/score", {"text_1": ["1", "2"], "text_2": documents}, "text_1"),
            ("/pooling", {"data": {"thing": "1", "names": [too_long]}, "io_processor": "nearest"}, "data[1]"),
        ):
            refused = http.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        data = {"data": THING, "task": "plugin", "io_processor": "nearest"}
        near = http.post("/pooling", json=data).json()
        assert near["data"] == {"name": THING["names"][1]}
        assert near["usage"]["prompt_tokens"] > len(THING["names"])
        failed = http.post("/pooling", json={"data": {"how": "response:key"}, "io_processor": "broken"})
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "request_failed")
        for wrong, param in (({"data": 4}, "data"), ({"io_processor": "no"}, "io_processor")):
            refused = http.post("/pooling", json={**data, **wrong})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        refused = http.post("/classify", json={"input": "1"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_task")


@pytest.fixture
def gateways(stack: LocalStack, tmp_path: Path) -> Iterator[list[LocalGateway]]:
    options = ["--model", "numbers", "--lease-ttl", "60"]
    gateways = [LocalGateway(stack.url, options, tmp_path / f"{number}.log") for number in range(2)]
    with gateways[0], gateways[1]:
        yield gateways


async def test_calls_with_a_key_are_pooled_once_at_two_gateways(
    client: Client, gateways: list[LocalGateway], tmp_path: Path
) -> None:
    """The first gateway is killed while the requests of all calls wait."""
    names = THING["names"]
    bodies: dict[str, Any] = {
        "/v1/embeddings": {"input": ["407", "12"]},
        "/pooling": {"input": "407", "task": "token_embed"},
        "/score": {"text_1": "407", "text_2": names},
        "/v1/rerank": {"query": "407", "documents": names},
    }
    await client.pause_generation()
    try:
        async with (
            httpx.AsyncClient(base_url=gateways[0].root_url, timeout=DEADLINE_S) as here,
            httpx.AsyncClient(base_url=gateways[1].root_url, timeout=DEADLINE_S) as there,
        ):

            def call(http: httpx.AsyncClient, path: str, **fields: Any) -> asyncio.Task[httpx.Response]:
                headers = {"Idempotency-Key": f"{tmp_path.name}{path}"}
                return asyncio.create_task(http.post(path, json=bodies[path] | fields, headers=headers))

            cut = [call(here, path) for path in bodies]
            async with asyncio.timeout(DEADLINE_S):
                while (await client.queue_stats()).depth < 2 + 1 + 4 + 4:
                    await asyncio.sleep(0.01)
            waiting = {request.request_id for request in await client.requests(RequestFilter(states=("waiting",)))}
            await asyncio.to_thread(gateways[0].kill)
            assert all(
                isinstance(error, httpx.HTTPError) for error in await asyncio.gather(*cut, return_exceptions=True)
            )
            joined = [call(there, path) for path in bodies]
            await client.resume_generation()
            replies = [await reply for reply in joined]
            assert [reply.status_code for reply in replies] == [200] * 4
            ids = [reply.json()["id"] for reply in replies]
            assert {request_id for request_id in waiting if request_id.startswith(tuple(ids))} == waiting
            assert replies[3].json()["results"][0]["index"] == 1
            for path, reply in zip(bodies, replies, strict=True):
                assert (await call(there, path)).json() == reply.json()
                assert (await call(there, path, priority=1)).status_code == 409
            data = {"data": THING, "io_processor": "nearest"}
            refused = await there.post("/pooling", json=data, headers={"Idempotency-Key": "data"})
            assert "cannot be used with data" in refused.json()["error"]["message"]
    finally:
        await client.resume_generation()


@pytest.fixture
def generating(stack: LocalStack, tmp_path: Path) -> Iterator[Gate]:
    """A second model on the same Redis, which generates; the gate limits its progress."""
    gate = Gate(tmp_path)
    options = ["--device", "cpu", "--threads", "1", "--served-model-name", "demo"]
    with gate.for_engines():
        worker = LocalWorker(str(MODEL), stack.url, options, tmp_path / "worker.log")
        worker.spawn()
    try:
        worker.await_ready()
        yield gate
    finally:
        gate.open()
        worker.stop()


async def test_a_thousand_texts_are_embedded_during_generations(
    client: Client, stack: LocalStack, generating: Gate
) -> None:
    texts = [f"{number_words(number)} and {number}" for number in range(1000)]
    prompts = ["count from four to nine:", "four plus two is", "what is seven times eight?"]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    alone = [(await client.generate(prompt, params, model="demo")).outputs[0].token_ids for prompt in prompts]
    await asyncio.to_thread(generating.hold_at, 8)
    streams = [client.stream(prompt, params, model="demo") for prompt in prompts]
    token_lists = [list((await anext(stream)).token_ids) for stream in streams]
    num_done, some_done = 0, asyncio.Event()

    def count() -> None:
        nonlocal num_done
        num_done += 1
        some_done.set()

    async def go_on() -> None:
        await some_done.wait()
        await asyncio.to_thread(generating.open)

    async def follow(stream: AsyncGenerator[Delta], tokens: list[int]) -> None:
        async for delta in stream:
            tokens += delta.token_ids

    embedding = client.encode_all(texts, PoolingParams(task="embed"), on_output=count, request_id="thousand")
    outputs, _ = await asyncio.gather(embedding, asyncio.gather(go_on(), *map(follow, streams, token_lists)))
    assert token_lists == alone
    assert num_done == len(texts)
    assert [(output.prompt, output.request_id) for output in outputs] == [
        (text, f"thousand-{index}") for index, text in enumerate(texts)
    ]
    broker = Broker(client._commands, Keys().model("numbers"))
    lengths = await asyncio.gather(*(broker.read_log(output.request_id) for output in outputs))
    assert {len(log) for log in lengths} == {1}
    for index in (0, 407, 999):
        vector = (await client.encode(texts[index])).outputs.vector
        assert outputs[index].outputs.vector == pytest.approx(vector, abs=1e-5)
    # Each has its own: a pair of neighbours that had changed places would be nearer to the other's text.
    assert len({output.outputs.pooled.data for output in outputs}) == len(texts)
