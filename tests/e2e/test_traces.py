"""Traces of generations that live through the death of an engine, and receivers of spans that hang or refuse."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams
from penstock.shared.broker.request_history import RequestFilter

from ..gate import Gate
from ..otlp_receiver import OtlpReceiver, ReceivedSpan, picture
from ..processes import DEADLINE_S, is_alive
from .following import beats

NUM_TOKENS, NUM_BEFORE = 60, 20
SECRET = "the secret word is heron"
BODY = {
    "messages": [{"role": "user", "content": f"{SECRET}, count from four to nine:"}],
    "temperature": 0,
    "ignore_eos": True,
    "max_tokens": NUM_TOKENS,
    "stop": ["a stop string"],
    "stream": True,
}
RUNNING = RequestFilter(states=("running",))
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


pytestmark = pytest.mark.xdist_group("traces")


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def stack(receiver: OtlpReceiver, shared_gate: Gate) -> Iterator[LocalStack]:
    """Two engines that send their spans."""
    options = ["--device", "cpu", "--served-model-name", "demo", "--threads", "1", "--engines", "2"]
    with pytest.MonkeyPatch.context() as patch, shared_gate.for_engines():
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with LocalStack(MODEL, [*options, "--otlp-traces-endpoint", receiver.url]) as stack:
            yield stack


@pytest.fixture(scope="module")
def gateway(
    stack: LocalStack, receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalGateway]:
    folder = tmp_path_factory.mktemp("gateway")
    options = ["--otlp-traces-endpoint", receiver.url, "--files-dir", str(folder / "files")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with LocalGateway(stack.url, options, folder / "gateway.log") as gateway:
            yield gateway


def trace_parent(*, is_sampled: bool = True) -> tuple[str, dict[str, str]]:
    trace_id = secrets.token_hex(16)
    return trace_id, {"traceparent": f"00-{trace_id}-{'ab' * 8}-0{int(is_sampled)}"}


async def test_a_generation_that_crosses_engines_is_one_trace(
    stack: LocalStack, gateway: LocalGateway, receiver: OtlpReceiver, gate: Gate
) -> None:
    trace_id, headers = trace_parent()
    gate.hold_at(NUM_BEFORE)
    reading = asyncio.create_task(read_stream(gateway, headers))
    first = await holder(stack, NUM_BEFORE)
    os.kill(first.core_pid, signal.SIGKILL)
    await asyncio.to_thread(receiver.wait, lambda: "attempt" in names(receiver, trace_id))
    gate.open()
    num_chunks, answer = await reading
    assert num_chunks > 0
    await asyncio.to_thread(receiver.wait, lambda: any(name.startswith("POST") for name in names(receiver, trace_id)))
    await asyncio.to_thread(receiver.wait, lambda: names(receiver, trace_id).count("attempt") == 2)
    spans = receiver.trace(trace_id)
    if path := os.environ.get("PENSTOCK_TEST_TRACE_FILE"):
        Path(path).write_text(picture(spans) + "\n")

    (http,), (enqueue,) = named(spans, "POST /v1/chat/completions"), named(spans, "enqueue")
    queues, (one, two) = named(spans, "queue"), named(spans, "attempt")
    assert (http.parent_id, enqueue.parent_id) == ("ab" * 8, http.span_id)
    assert {span.parent_id for span in (*queues, one, two)} == {enqueue.span_id}
    assert (http.service, enqueue.service, one.service) == ("penstock-gateway", "penstock-gateway", "penstock-worker")
    assert (http.attributes["http.route"], http.attributes["http.response.status_code"]) == (
        "/v1/chat/completions",
        200,
    )
    assert len(queues) == 2
    assert [span.ended_ns for span in queues] == pytest.approx([one.started_ns, two.started_ns], abs=1)
    assert one.ended_ns <= two.ended_ns <= http.ended_ns

    assert one.is_error
    assert not two.is_error
    assert (one.attributes["penstock.attempt"], two.attributes["penstock.attempt"]) == (1, 2)
    assert one.attributes["penstock.epoch"] < two.attributes["penstock.epoch"]
    assert one.attributes["penstock.engine.id"] == first.engine_id != two.attributes["penstock.engine.id"]
    assert one.attributes["penstock.attempt.outcome"] == "engine_died"
    assert "killed by SIGKILL" in one.attributes["penstock.attempt.cause"]
    assert [span.attributes["penstock.attempt.first_token_index"] for span in (one, two)] == [0, NUM_BEFORE]
    ((linked_trace, linked_span, link),) = two.links
    assert (linked_trace, linked_span) == (trace_id, one.span_id)
    assert link["penstock.epoch"] == one.attributes["penstock.epoch"]
    assert link["penstock.attempt.outcome"] == "reclaimed"
    for attempt in (one, two):
        (prefill,), (decode,) = (
            [span for span in named(spans, name) if span.parent_id == attempt.span_id] for name in ("prefill", "decode")
        )
        assert attempt.started_ns <= prefill.started_ns <= prefill.ended_ns == decode.started_ns <= decode.ended_ns
    check_end(two, answer)
    assert not [span for span in spans if SECRET.split()[-1] in repr(span) or "a stop string" in repr(span)]


async def test_unsampled_requests_have_no_spans_and_requests_without_a_trace_get_one(
    stack: LocalStack, gateway: LocalGateway, receiver: OtlpReceiver
) -> None:
    unsampled_id, headers = trace_parent(is_sampled=False)
    await read_stream(gateway, headers)
    late_id, headers = trace_parent()
    await read_stream(gateway, headers)
    await asyncio.to_thread(receiver.wait, lambda: {"attempt", "enqueue"} <= set(names(receiver, late_id)))
    assert receiver.trace(unsampled_id) == []
    async with Client.connect(stack.url) as client:
        assert await client.is_tracing_enabled() is True
        # One that comes without a trace has one of its own.
        output = await client.generate(SECRET, SHORT)
    await asyncio.to_thread(receiver.wait, lambda: of_request(receiver, output.request_id))
    (own,) = of_request(receiver, output.request_id)
    assert own.parent_id == ""
    assert sorted(span.name for span in receiver.trace(own.trace_id)) == ["attempt", "decode", "prefill", "queue"]


def check_end(attempt: ReceivedSpan, answer: dict[str, Any]) -> None:
    """Check the names of OpenTelemetry and vLLM on the attempt that brought the request to its end."""
    attributes = attempt.attributes
    assert attributes["gen_ai.operation.name"] == "chat"
    assert (attributes["gen_ai.request.model"], attributes["gen_ai.response.model"]) == ("demo", "demo")
    assert (attributes["gen_ai.request.max_tokens"], attributes["gen_ai.request.temperature"]) == (NUM_TOKENS, 0.0)
    assert attributes["gen_ai.request.id"] == answer["id"]
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes["gen_ai.usage.output_tokens"] == attributes["gen_ai.usage.completion_tokens"] == NUM_TOKENS
    assert attributes["gen_ai.usage.input_tokens"] == attributes["gen_ai.usage.prompt_tokens"] > 0
    assert 0 < attributes["gen_ai.latency.time_to_first_token"] < attributes["gen_ai.latency.e2e"]


async def test_spans_record_requeued_and_cancelled_requests(
    stack: LocalStack, gateway: LocalGateway, receiver: OtlpReceiver, gate: Gate
) -> None:
    trace_id, headers = trace_parent()
    gate.hold_at(NUM_BEFORE)
    reading = asyncio.create_task(read_stream(gateway, headers))
    first = await holder(stack, NUM_BEFORE)
    async with Client.connect(stack.url) as client:
        await client.sleep(engine_id=first.engine_id)
        gate.open()
        await reading
        await asyncio.to_thread(receiver.wait, lambda: names(receiver, trace_id).count("attempt") == 2)
        one, two = named(receiver.trace(trace_id), "attempt")
        assert (one.attributes["penstock.attempt.outcome"], one.is_error) == ("handed_back", False)
        assert [(span_id, attributes["penstock.attempt.outcome"]) for _, span_id, attributes in two.links] == [
            (one.span_id, "handed_back")
        ]
        await client.wake_up()
        trace_id, headers = trace_parent()
        gate.hold_at(NUM_BEFORE)
        async with aclosing(client.stream(SECRET, LONG, trace_headers=headers)) as deltas:
            await anext(deltas)
    await asyncio.to_thread(receiver.wait, lambda: "attempt" in names(receiver, trace_id))
    (attempt,) = named(receiver.trace(trace_id), "attempt")
    assert attempt.attributes["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert attempt.parent_id == "ab" * 8


async def test_a_receiver_that_refuses_costs_no_request(
    stack: LocalStack, gateway: LocalGateway, receiver: OtlpReceiver
) -> None:
    receiver.refuse()
    _, headers = trace_parent()
    try:
        answers = [await read_stream(gateway, headers) for _ in range(3)]
        await asyncio.to_thread(receiver.wait, lambda: receiver.num_refused >= 2)
    finally:
        receiver.accept()
    assert len({answer["text"] for _, answer in answers}) == 1
    taken_id, headers = trace_parent()
    await read_stream(gateway, headers)
    await asyncio.to_thread(receiver.wait, lambda: {"attempt", "enqueue"} <= set(names(receiver, taken_id)))


async def test_a_receiver_that_hangs_costs_no_request_and_no_end_in_order(
    stack: LocalStack, gateway: LocalGateway, receiver: OtlpReceiver, gate: Gate
) -> None:
    """The last one here: requests are answered, an engine that dies is replaced, and gateway and worker end."""
    receiver.hang()
    num_before = len(receiver.spans)
    _, headers = trace_parent()
    gate.open()
    first = (await read_stream(gateway, headers))[1]
    await asyncio.to_thread(receiver.wait, lambda: receiver.num_hanging)
    async with Client.connect(stack.url, otlp_traces_endpoint=receiver.url) as client:
        outputs = await asyncio.gather(*(client.generate(SECRET, SHORT) for _ in range(20)))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    gate.hold_at(NUM_BEFORE)
    reading = asyncio.create_task(read_stream(gateway, headers))
    os.kill((await holder(stack, NUM_BEFORE)).core_pid, signal.SIGKILL)
    gate.open()
    assert (await reading)[1]["text"] == first["text"]
    assert await asyncio.to_thread(gateway.stop) == 0
    worker = stack.workers[0]
    os.kill(worker.pid, signal.SIGTERM)
    assert await asyncio.to_thread(worker.await_end) == 0
    assert len(receiver.spans) == num_before
    assert '"spans_not_sent"' in await asyncio.to_thread(lambda: worker.log)


async def read_stream(gateway: LocalGateway, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
    """The number of its chunks, and id and text of the answer."""
    answer: dict[str, Any] = {"text": ""}
    num_chunks = 0
    async with (
        httpx.AsyncClient(base_url=gateway.base_url, timeout=DEADLINE_S) as http,
        http.stream("POST", "/chat/completions", json=BODY, headers=headers) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                num_chunks += 1
                answer["id"] = chunk["id"]
                answer["text"] += chunk["choices"][0]["delta"].get("content", "")
    return num_chunks, answer


async def holder(stack: LocalStack, num_tokens: int) -> Any:
    """Return the engine whose request has this many tokens, as soon as its heartbeat names a living process."""
    async with Client.connect(stack.url) as client, asyncio.timeout(DEADLINE_S):
        while True:
            running = [one for one in await client.requests(RUNNING) if one.num_output_tokens >= num_tokens]
            beat = (await beats(stack.url)).get(running[0].engine_id) if running else None
            if beat is not None and is_alive(beat.core_pid):
                return beat
            await asyncio.sleep(0.01)


def names(receiver: OtlpReceiver, trace_id: str) -> list[str]:
    return [span.name for span in receiver.spans if span.trace_id == trace_id]


def named(spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.name == name]


def of_request(receiver: OtlpReceiver, request_id: str) -> list[ReceivedSpan]:
    return [span for span in receiver.spans if span.attributes.get("gen_ai.request.id") == request_id]
