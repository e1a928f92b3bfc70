"""Setup of our provider, and the bound of its end."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import INVALID_SPAN
from structlog.testing import capture_logs

from penstock.shared.tracing.provider import close_provider, open_provider
from penstock.shared.tracing.spans import context_of, headers_of, tracer_of

from ...otlp_receiver import OtlpReceiver

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"


async def opened(endpoint: str, service: str = "s", instance: str = "") -> TracerProvider:
    return await asyncio.to_thread(open_provider, endpoint, service=service, instance=instance)


async def attributes_of(endpoint: str) -> Resource:
    provider = await opened(endpoint, service="penstock-worker", instance="engine-0")
    await close_provider(provider)
    return provider.resource


async def test_the_environment_names_the_service_before_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = (await attributes_of("http://localhost:1")).attributes
    assert (attributes["service.name"], attributes["service.instance.id"]) == ("penstock-worker", "engine-0")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=pod-7,deployment.environment.name=test")
    attributes = (await attributes_of("http://localhost:1")).attributes
    assert (attributes["service.name"], attributes["service.instance.id"]) == ("mine", "pod-7")
    assert attributes["deployment.environment.name"] == "test"


async def test_headers_and_sampler_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=secret")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with OtlpReceiver() as receiver:
        provider = await opened(receiver.url)
        for context in (context_of(None), context_of({"traceparent": f"{PARENT}-01"})):
            tracer_of(provider).start_span("one", context).end()
        await close_provider(provider)
        assert [span.parent_id for span in receiver.spans] == [PARENT.split("-")[2]]
        assert receiver.headers[0]["x-api-key"] == "secret"


async def test_a_receiver_that_hangs_does_not_hold_up_the_end() -> None:
    with OtlpReceiver() as receiver:
        receiver.hang()
        provider = await opened(receiver.url)
        for _ in range(3_000):  # more than wait for it: the others are dropped
            tracer_of(provider).start_span("one").end()
        with capture_logs() as logged:
            await close_provider(provider)
        assert [line["event"] for line in logged] == ["spans_not_sent"]
        assert receiver.num_hanging == 1
        assert receiver.spans == []


def test_headers_continue_a_trace_and_mark_unsampled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    incoming = {"traceparent": f"{PARENT}-00", "tracestate": "a=b", "baggage": "c=d"}
    provider = open_provider("http://localhost:1", service="s")
    try:
        headers = headers_of(tracer_of(provider).start_span("one", context_of(incoming)), incoming)
        # The state that a caller sends of a trace without its parent belongs to another one.
        alone = headers_of(tracer_of(provider).start_span("one", context_of(None)), {"tracestate": "old=1"})
    finally:
        provider.shutdown()
    assert headers["traceparent"].startswith(PARENT[:36])
    assert (headers["tracestate"], headers["baggage"]) == ("a=b", "c=d")
    assert not any(int(one["traceparent"][-2:], 16) & 1 for one in (headers, alone))
    assert "tracestate" not in alone


def test_a_provider_without_spans_leaves_headers_unchanged() -> None:
    incoming = {"traceparent": f"{PARENT}-01", "tracestate": "a=b"}
    assert headers_of(INVALID_SPAN, incoming) == incoming


@pytest.mark.parametrize("headers", [None, {}, {"baggage": "a=b"}, {"traceparent": "nonsense"}])
def test_requests_without_a_trace_have_none(headers: dict[str, str] | None) -> None:
    assert not context_of(headers)
