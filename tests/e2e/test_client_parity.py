"""Features of vLLM's clients, from the real stack with the demo model."""

from __future__ import annotations

import asyncio
import json
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.local.stack import LocalStack
from penstock.producer import (
    LLM,
    Client,
    Counter,
    EngineCallError,
    Gauge,
    Histogram,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from penstock.shared import errors
from penstock.worker.text.tokenizer import TextCodec

from ..adapter_folder import write_adapter
from ..gate import Gate
from ..processes import DEADLINE_S
from .following import LONG, PROMPT, Following

pytestmark = pytest.mark.xdist_group("deployment")

PROMPT_TOKEN_IDS = TextCodec.load(MODEL).encode(PROMPT)
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def lines_of(log_path: Path, request_id: str) -> list[dict[str, Any]]:
    """The lines of a request; the log is shared with other tests' requests."""
    lines = [json.loads(line) for line in log_path.read_text().splitlines() if request_id in line]
    return [line for line in lines if line.get("request_id") == request_id]


async def ends_in(log_path: Path, request_id: str) -> list[dict[str, Any]]:
    """Return the log lines about the end of a request, once there is one: the worker writes it together with the
    answer.
    """
    async with asyncio.timeout(DEADLINE_S):
        while not (ends := [one for one in lines_of(log_path, request_id) if one["event"] == "request_finished"]):
            await asyncio.sleep(0.02)
    return ends


@pytest.fixture(scope="module")
def expected(deployment: LocalStack) -> list[int]:
    """The undisturbed answer to ``LONG``."""
    with LLM(deployment.url, model="demo") as llm:
        return list(llm.generate(PROMPT, LONG, use_tqdm=False)[0].outputs[0].token_ids)


async def outputs(client: Client, prompt: Any, **params: Any) -> list[RequestOutput]:
    sampling = SamplingParams(n=2, seed=3, temperature=1.0, max_tokens=40, ignore_eos=True, logprobs=1, **params)
    return [output async for output in client.stream_outputs(prompt, sampling)]


async def test_outputs_of_each_kind_are_those_that_generate_gives(client: Client) -> None:
    kinds = [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY]
    pieces, growing, final = [await outputs(client, PROMPT, output_kind=kind) for kind in kinds]
    assert len(final) == 1
    for answer in final[0].outputs:
        mine = [item.outputs[0] for item in pieces if item.outputs[0].index == answer.index]
        assert [token_id for part in mine for token_id in part.token_ids] == answer.token_ids
        assert "".join(part.text for part in mine) == answer.text
        assert mine[-1].cumulative_logprob == pytest.approx(answer.cumulative_logprob)
        whole = [item.outputs[0] for item in growing if item.outputs[0].index == answer.index][-1]
        assert (whole.token_ids, whole.text, whole.finish_reason) == (answer.token_ids, answer.text, "length")
    assert pieces[-1].usage is not None
    assert final[0].usage is not None
    assert pieces[-1].usage.num_output_tokens == final[0].usage.num_output_tokens == 80


async def test_the_card_and_the_tokenizer_are_those_of_the_model(client: Client) -> None:
    card = await client.get_model_config()
    (engine,) = await client.engines()
    assert card.setup is not None
    assert card.setup == engine.setup, "each engine tells its own, the card that of the last to begin"
    assert (card.setup.max_num_seqs, card.setup.block_size, card.setup.kv_cache_dtype) == (32, 16, card.kv_cache_dtype)
    assert card.setup.kv_cache_size_tokens >= card.max_model_len
    assert set(card.setup.versions) == {"python", "penstock", "torch", "transformers"}
    assert (card.model, card.architecture, card.max_model_len) == ("demo", "LlamaForCausalLM", 2048)
    assert (card.has_chat_template, card.eos_token_ids, card.quantization) == (True, [2], "")
    assert card.attention_backend in ("native", "reference", "triton")
    assert card.kv_cache_dtype == card.dtype
    assert card.generation_config == {"do_sample": False, "eos_token_id": 2}
    assert card.registered_at > 1.7e9
    assert await client.get_supported_tasks() == ("generate",)
    assert await client.is_tracing_enabled() is False
    tokenizer = await client.get_tokenizer()
    token_ids = tokenizer.encode(PROMPT).ids
    assert token_ids == PROMPT_TOKEN_IDS
    output = await client.generate(token_ids, GREEDY)
    assert tokenizer.decode(output.outputs[0].token_ids) == output.text


async def test_running_requests_pause_for_a_cache_reset_and_resume(
    client: Client, gate: Gate, expected: list[int]
) -> None:
    following = Following(client, gate)
    await following.under_way()
    assert list((await client.reset_prefix_cache()).values()) == [False]
    assert list((await client.reset_prefix_cache(reset_running_requests=True)).values()) == [True]
    await following.check(expected)


async def test_a_pause_that_aborts_and_clears(client: Client, gate: Gate, expected: list[int]) -> None:
    following = Following(client, gate)
    await following.under_way()
    try:
        assert list((await client.pause_generation(mode="abort", clear_cache=True)).values()) == [True]
        async with asyncio.timeout(DEADLINE_S):
            await following.task
        assert [delta.finish_reason for delta in following.deltas if delta.finished] == ["abort"]
        token_ids = [token_id for delta in following.deltas for token_id in delta.token_ids]
        assert 0 < len(token_ids) < len(expected)
        assert token_ids == expected[: len(token_ids)]
        waiting = asyncio.create_task(client.generate("spell 7:", GREEDY))
    finally:
        await client.resume_generation()
    assert (await waiting).text == " seven."
    await client.wait_for_requests_to_drain(60)
    assert await client.get_num_unfinished_requests() == 0


async def test_engines_without_adapters_refuse_adapter_calls(client: Client, tmp_path: Path) -> None:
    folder = await asyncio.to_thread(write_adapter, tmp_path)
    for call in (partial(client.add_lora, "cats", folder), partial(client.pin_lora, "cats")):
        with pytest.raises(EngineCallError, match="serves no adapters") as caught:
            await call()
        assert {type(error) for error in caught.value.errors.values()} == {errors.UnsupportedCallError}
    (engine_id,) = await client.list_loras()
    assert await client.list_loras() == {engine_id: set()}
    assert await client.reset_mm_cache() == await client.reset_encoder_cache() == {engine_id: 0}
    with pytest.raises(errors.UnsupportedParameterError, match=r"lora_request .*: this engine serves no adapters"):
        await client.generate("hi", GREEDY, lora_request="cats")
    assert await client.remove_lora("cats") == {engine_id: False}


async def test_the_worker_logs_the_trace_of_a_request(deployment: LocalStack, client: Client) -> None:
    traced, untraced = uuid.uuid4().hex, uuid.uuid4().hex
    await client.generate("spell 7:", GREEDY, request_id=traced, trace_headers=TRACE, external_req_id="mine")
    await client.generate("spell 7:", GREEDY, request_id=untraced)
    ((line,), (other,)) = [await ends_in(deployment.log_path, request_id) for request_id in (traced, untraced)]
    assert line["trace_id"] == TRACE["traceparent"].split("-")[1]
    assert (line["x_request_id"], line["model"], line["tenant"]) == ("mine", "demo", "default")
    assert (line["finish_reason"], line["level"]) == ("stop", "info")
    assert line["num_prompt_tokens"] > 0 < line["num_output_tokens"]
    assert 0 <= line["queue_s"] <= line["time_to_first_token_s"] <= line["latency_s"]
    assert not {"trace_id", "x_request_id"} & set(other)


async def test_a_cancelled_request_has_its_line_and_no_warning(deployment: LocalStack, client: Client) -> None:
    request_id = uuid.uuid4().hex
    handle = await client.submit(PROMPT, LONG, request_id=request_id)
    async for _ in handle.stream():
        break
    await handle.cancel()
    (line,) = await ends_in(deployment.log_path, request_id)
    assert (line["finish_reason"], line["level"]) == ("cancelled", "info")
    assert [one for one in lines_of(deployment.log_path, request_id) if one["level"] != "info"] == []


async def test_metrics_are_those_of_queue_and_engines(client: Client) -> None:
    await client.generate("spell 7:", GREEDY)

    async def counted() -> dict[str, Any]:
        return {metric.name: metric for metric in await client.get_metrics()}

    async with asyncio.timeout(DEADLINE_S):  # heartbeats come every second
        while (
            not (metrics := await counted())
            .get("penstock:generation_tokens_total", Gauge(name="", labels={}, value=0))
            .value
        ):
            await asyncio.sleep(0.05)
    (engine,) = await client.engines()
    tokens = metrics["penstock:generation_tokens_total"]
    assert isinstance(tokens, Counter)
    assert tokens.value > 0
    assert tokens.labels == {"model_name": "demo", "engine": engine.engine_name}
    first_tokens = metrics["penstock:time_to_first_token_seconds"]
    assert isinstance(first_tokens, Histogram)
    assert first_tokens.buckets["+Inf"] == first_tokens.count > 0
    assert list(first_tokens.buckets.values()) == sorted(first_tokens.buckets.values())
    assert metrics["penstock:queue_paused"] == Gauge(
        name="penstock:queue_paused", labels={"model_name": "demo"}, value=0.0
    )


def test_the_blocking_facade(deployment: LocalStack) -> None:
    one = [{"role": "user", "content": "spell 7:"}]
    other = [{"role": "user", "content": "spell 12:"}]
    with LLM(deployment.url, model="demo") as llm:
        assert [output.text for output in llm.chat([one, other], GREEDY)] == [" seven.", " twelve."]
        assert [output.text for output in llm.chat(one, GREEDY, use_tqdm=False)] == [" seven."]
        assert llm.get_model_config().has_chat_template
        assert llm.get_tokenizer().token_to_id("nothing of the kind") is None
        assert list(llm.is_sleeping().values()) == [False]
        assert (llm.is_running, llm.is_stopped, llm.errored) == (True, False, False)
        llm.abort("unknown")
        with pytest.raises(errors.UnsupportedTaskError, match="does not embed"):
            llm.encode(["a", "b"])
        for wrong in ("hi", ["hi"], [one, "hi"], [one, []]):
            with pytest.raises(errors.ValidationError, match="must be a conversation"):
                llm.chat(wrong, GREEDY)  # pyright: ignore[reportArgumentType]
