"""Types that callers of the public API see. Nothing here runs: pyright checks it in `make check`.

``assert_type`` fails for any other type, and an ignore that nothing needs is an error, so each says that the code
behind it does not type-check.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, assert_type

from penstock.producer import (
    LLM,
    Client,
    DataPrompt,
    Delta,
    EngineDeadError,
    FinishReason,
    LoRARequest,
    Metric,
    ModelCard,
    PoolingParams,
    PoolingRequestOutput,
    ProcessedRequestOutput,
    RequestHandle,
    RequestOutput,
    SamplingParams,
    SleepState,
)


async def words() -> AsyncIterator[str]:
    yield "a"


async def requests(client: Client, params: SamplingParams, lora: LoRARequest) -> None:
    output = await client.generate("a", params, model="m", priority=1, trace_headers={"traceparent": "00"})
    assert_type(output, RequestOutput)
    assert_type(output.outputs[0].finish_reason, FinishReason | None)
    assert_type(output.text, str)
    assert_type(client.stream([1, 2], timeout_s=3), AsyncGenerator[Delta])
    assert_type(client.stream_outputs(words(), params, lora_request=lora), AsyncGenerator[RequestOutput])
    assert_type(await client.encode("a", PoolingParams(task="embed")), PoolingRequestOutput)
    assert_type(await client.encode(DataPrompt({"a": 1})), ProcessedRequestOutput)
    assert_type((await client.embed(["a", "b"]))[0].outputs.embedding, list[float])
    assert_type((await client.score("a", ["b"]))[0].outputs.score, float)
    handle = await client.submit([{"role": "user", "content": "a"}], request_id="r")
    assert_type(handle, RequestHandle)
    assert_type(await client.add_request("r", "a", params, band="batch"), RequestHandle)
    assert_type(await client.submit_many(["a", [1]], [params, None]), list[RequestHandle])
    assert_type(await handle.result(), RequestOutput)
    assert_type(handle.stream_outputs(), AsyncGenerator[RequestOutput])
    assert_type(await client.abort(["r", "s"], internal=True), None)
    await client.generate("a", params, data_parallel_rank=1)  # pyright: ignore[reportCallIssue]
    await client.generate("a", params, priority="high")  # pyright: ignore[reportArgumentType]
    await client.generate("a", PoolingParams())  # pyright: ignore[reportArgumentType]
    await client.add_request("r", "a", request_id="s")  # pyright: ignore[reportCallIssue]
    client.stream(5)  # pyright: ignore[reportArgumentType]


def connections() -> None:
    assert_type(Client.connect(), Client)
    assert_type(Client.connect("redis://a", model="m", tenant="t", result_ttl_s=3.0, shards={"a": "redis://b"}), Client)
    assert_type(LLM("redis://a", namespace="n", fail_fast=True), LLM)
    Client.connect("redis://a", modle="m")  # pyright: ignore[reportCallIssue]
    Client.connect("redis://a", result_ttl_s="1")  # pyright: ignore[reportArgumentType]
    LLM("redis://a", namespase="n")  # pyright: ignore[reportCallIssue]
    SamplingParams(temprature=0.3)  # pyright: ignore[reportCallIssue]


async def control(client: Client, lora: LoRARequest) -> None:
    assert_type(await client.sleep(2, mode="wait", engine_id="e"), dict[str, SleepState])
    assert_type(await client.reset_prefix_cache(reset_running_requests=True), dict[str, bool])
    assert_type(await client.reset_mm_cache(timeout_s=1), dict[str, int])
    assert_type(await client.add_lora(lora), dict[str, bool])
    assert_type(await client.list_loras(model="m"), dict[str, set[int]])
    assert_type(await client.collective_rpc("device_info"), dict[str, Any])
    assert_type(await client.pause_generation(mode="abort", clear_cache=True), dict[str, bool])
    assert_type(await client.wait_for_requests_to_drain(5), None)
    assert_type(await client.get_model_config(), ModelCard)
    assert_type(await client.get_supported_tasks("m"), tuple[str, ...])
    assert_type(await client.get_metrics(), list[Metric])
    assert_type((await client.get_tokenizer()).encode("a").ids, list[int])
    assert_type(client.dead_error, EngineDeadError)
    await client.pause_generation(mode="drop")  # pyright: ignore[reportArgumentType]
    await client.is_sleeping(engine="e")  # pyright: ignore[reportCallIssue]


def blocking(llm: LLM, params: SamplingParams) -> None:
    assert_type(llm.generate(["a", "b"], [params, params]), list[RequestOutput])
    assert_type(llm.chat([{"role": "user", "content": "a"}], params), list[RequestOutput])
    assert_type(llm.encode("a"), list[PoolingRequestOutput])
    assert_type(llm.encode(DataPrompt("a")), list[ProcessedRequestOutput])
    assert_type(llm.sleep(1, mode="keep", engine_id="e"), dict[str, SleepState])
    assert_type(llm.get_model_config("m"), ModelCard)
    assert_type(llm.pause_generation(mode="wait"), dict[str, bool])
    assert_type(llm.is_running, bool)
    llm.sleep("deep")  # pyright: ignore[reportArgumentType]
    llm.sleep(depth=1)  # pyright: ignore[reportCallIssue]
