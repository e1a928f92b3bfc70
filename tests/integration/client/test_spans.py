"""Spans that a client makes, and what of them its requests bring to engines; the engine is played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind

from penstock.producer import Client, EngineDeadError, SamplingParams
from penstock.shared.broker import Broker
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.requests import EngineCoreRequest

from ...otlp_receiver import OtlpReceiver
from .harness import claim_one, write

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class App:
    """An app that has set up OpenTelemetry by itself."""

    def __init__(self, *, samples: bool = True) -> None:
        self.exporter = InMemorySpanExporter()
        sampler = None if samples else ParentBased(ALWAYS_OFF)
        self.provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("app")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
async def traced(redis_url: str, namespace: str, broker: Broker, app: App) -> AsyncIterator[Client]:
    async with Client.connect(redis_url, namespace=namespace, tracer_provider=app.provider) as client:
        yield client


async def headers_of_next(broker: Broker) -> dict[str, str]:
    claim = await claim_one(broker)
    request = msgspec.msgpack.decode(claim.payload, type=EngineCoreRequest)
    await write(broker, claim, 0, 65, end=FinishReason.STOP)
    return request.trace_headers or {}


def header(span: ReadableSpan) -> str:
    context = span.context
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


@pytest.mark.parametrize("way", ["generate", "submit"])
async def test_the_callers_current_span_is_the_parent(traced: Client, broker: Broker, app: App, way: str) -> None:
    with app.tracer.start_as_current_span("my handler") as handler:
        asking = asyncio.create_task(getattr(traced, way)("hi", request_id="r", tenant="acme"))
        headers = await headers_of_next(broker)
        await asking
    (span,) = app.named("enqueue")
    assert (span.parent, span.kind) == (handler.get_span_context(), SpanKind.PRODUCER)
    assert headers == {"traceparent": header(span)}
    attributes = span.attributes or {}
    assert (attributes["gen_ai.request.model"], attributes["gen_ai.request.id"]) == ("m", "r")
    assert (attributes["penstock.tenant"], attributes["penstock.enqueue.num_requests"]) == ("acme", 1)


async def test_trace_headers_of_a_request_take_precedence(traced: Client, broker: Broker, app: App) -> None:
    given = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b", "baggage": "c=d"}
    with app.tracer.start_as_current_span("my handler"):
        await traced.submit("hi", trace_headers=given)
    (span,) = app.named("enqueue")
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert await headers_of_next(broker) == {**given, "traceparent": header(span)}
    assert given["traceparent"].endswith(f"{PARENT}-01")


async def test_many_requests_of_one_call_have_one_span(traced: Client, broker: Broker, app: App) -> None:
    await traced.submit_many(["one", "two", "three"])
    (span,) = app.named("enqueue")
    assert (span.attributes or {})["penstock.enqueue.num_requests"] == 3
    assert [await headers_of_next(broker) for _ in range(3)] == [{"traceparent": header(span)}] * 3


async def test_answers_of_one_request_have_a_span_each(traced: Client, broker: Broker, app: App) -> None:
    asking = asyncio.create_task(traced.generate("hi", SamplingParams(n=2)))
    told = [await headers_of_next(broker) for _ in range(2)]
    await asking
    assert sorted(one["traceparent"] for one in told) == sorted(map(header, app.named("enqueue")))


@pytest.mark.parametrize("headers", [None, {"traceparent": f"00-{TRACE}-{PARENT}-00"}])
async def test_an_unsampled_request_has_no_span_and_passes_the_flag_to_engines(
    redis_url: str, namespace: str, broker: Broker, headers: dict[str, str] | None
) -> None:
    app = await asyncio.to_thread(App, samples=False)
    async with Client.connect(redis_url, namespace=namespace, tracer_provider=app.provider) as client:
        await client.submit("hi", trace_headers=headers)
    assert app.named("enqueue") == []
    told = (await headers_of_next(broker))["traceparent"]
    assert int(told[-2:], 16) & 1 == 0
    assert headers is None or told.split("-")[1] == TRACE


async def test_a_refusal_is_recorded_with_its_code(traced: Client, broker: Broker, app: App) -> None:
    with pytest.raises(EngineDeadError):
        await traced.generate("hi", fail_fast=True)
    (span,) = app.named("enqueue")
    assert ((span.attributes or {})["error.type"], span.status.is_ok) == (EngineDeadError.code, False)


async def test_a_client_sends_its_spans_before_it_leaves(redis_url: str, namespace: str, broker: Broker) -> None:
    with OtlpReceiver() as receiver:
        endpoint = receiver.url
        async with Client.connect(redis_url, namespace=namespace, otlp_traces_endpoint=endpoint) as client:
            await client.submit("hi")
        assert [(span.name, span.service) for span in receiver.spans] == [("enqueue", "penstock-client")]
        told = await headers_of_next(broker)
        assert told["traceparent"].startswith(f"00-{receiver.spans[0].trace_id}-{receiver.spans[0].span_id}-")
