"""Anthropic's Messages API through the real `anthropic` package, against a running gateway."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic

from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client
from penstock.shared.queue.policy import QueuePolicy, TenantPolicy

from ...gate import Gate
from ...processes import DEADLINE_S
from ..following import beats

pytestmark = pytest.mark.xdist_group("deployment")

COUNT = "count from four to nine:"
COUNTED = " four five six seven eight nine."
MESSAGES: Any = [{"role": "user", "content": COUNT}]
CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"name": "weather", "description": "Reports.", "input_schema": CITY}
THOUGHT = r"<think>\nhm, (four|two)\n</think>\n\n"
ALL = THOUGHT + r'I look\. <tool_call>\{"name": "weather", "arguments": \{"city": "(Bonn|Rome)"\}\}</tool_call>'
# Fields that the package does not know.
EXTRA = {"temperature", "structured_outputs", "ignore_eos"}
BODY: dict[str, Any] = {"model": "demo", "max_tokens": 120, "temperature": 0, "messages": MESSAGES}
# A forced grammar makes the demo model think and call a tool.
WITH_CALL: dict[str, Any] = {**BODY, "tools": [WEATHER], "structured_outputs": {"regex": ALL}, "stream": True}


@pytest.fixture
async def http(gateway: LocalGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.root_url, timeout=DEADLINE_S) as http:
        yield http


def arguments_of(**body: Any) -> dict[str, Any]:
    """Return the arguments of the package's methods for a body."""
    extra = {name: value for name, value in body.items() if name in EXTRA}
    return {name: value for name, value in body.items() if name not in EXTRA} | {"extra_body": extra}


class Frame:
    """An event as it was sent: its type, its id and its data."""

    def __init__(self, text: str) -> None:
        lines = dict(line.split(": ", 1) for line in text.splitlines() if not line.startswith(":"))
        self.kind, self.event_id, self.data = lines["event"], lines.get("id"), json.loads(lines["data"])
        assert self.data["type"] == self.kind


async def read_frames(
    http: httpx.AsyncClient, body: dict[str, Any], after: str | None = None, *, limit: int | None = None
) -> list[Frame]:
    """Return the events of a stream, or the first ``limit`` of them, after the event ``after``."""
    headers = {} if after is None else {"Last-Event-ID": after}
    frames: list[Frame] = []
    async with http.stream("POST", "/v1/messages", json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        pending = ""
        async for text in response.aiter_text():
            pending += text
            *whole, pending = pending.split("\n\n")
            frames += [Frame(frame) for frame in whole if frame.strip(":\n")]
            if limit is not None and len(frames) >= limit:
                return frames[:limit]
    return frames


def characters_of(events: list[Frame]) -> list[Any]:
    """Return the events in order, each delta as its characters; without pings."""
    pieces: list[Any] = []
    for event in events:
        delta = event.data.get("delta", {})
        text = delta.get("text") or delta.get("thinking") or delta.get("partial_json")
        if text is not None:
            pieces += [(event.data["index"], delta["type"], char) for char in text]
        elif event.kind != "ping":
            pieces.append(event.data)
    return pieces


async def test_a_message_whole_and_streamed(claude: AsyncAnthropic) -> None:
    whole = await claude.messages.create(**arguments_of(**BODY))
    async with claude.messages.stream(**arguments_of(**BODY)) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        streamed: Any = await stream.get_final_message()
    assert text == COUNTED
    for message in (whole, streamed):
        (block,) = message.content
        assert (block.type, block.text, message.stop_reason) == ("text", COUNTED, "end_turn")
        assert (message.role, message.model, message.id[:4]) == ("assistant", "demo", "msg_")
    assert whole.usage.output_tokens == streamed.usage.output_tokens > 5
    prompt = [usage.input_tokens + (usage.cache_read_input_tokens or 0) for usage in (whole.usage, streamed.usage)]
    counted = await claude.messages.count_tokens(model="demo", messages=MESSAGES)
    assert prompt == [counted.input_tokens] * 2
    response = await claude.messages.with_raw_response.create(**arguments_of(**BODY))
    assert response.headers["request-id"] == response.headers["x-request-id"]


async def test_a_tool_in_two_steps_with_thinking(claude: AsyncAnthropic) -> None:
    body = {name: value for name, value in WITH_CALL.items() if name != "stream"}
    whole = await claude.messages.create(**arguments_of(**body))
    async with claude.messages.stream(**arguments_of(**body)) as stream:
        streamed: Any = await stream.get_final_message()
    for message in (whole, streamed):
        thinking, text, call = message.content
        assert (thinking.type, text.type, call.type) == ("thinking", "text", "tool_use")
        assert (text.text, call.name, message.stop_reason) == ("I look.", "weather", "tool_use")
        assert call.input in ({"city": "Bonn"}, {"city": "Rome"})
        assert len(thinking.signature) == 64
    result: Any = {
        "type": "tool_result",
        "tool_use_id": whole.content[2].id,
        "content": [{"type": "text", "text": "9"}],
    }
    turns: Any = [*MESSAGES, whole.to_param(), {"role": "user", "content": [result, {"type": "text", "text": COUNT}]}]
    answer = await claude.messages.create(
        **arguments_of(**BODY | {"messages": turns, "tools": [WEATHER], "tool_choice": {"type": "none"}})
    )
    assert answer.content[0].text == COUNTED


async def test_forced_tools_formats_and_stop_sequences(claude: AsyncAnthropic) -> None:
    choice = {"type": "tool", "name": "weather"}
    forced = await claude.messages.create(**arguments_of(**BODY, tools=[WEATHER], tool_choice=choice))
    (call,) = forced.content
    assert (call.type, forced.stop_reason) == ("tool_use", "tool_use")
    output: Any = {"format": {"type": "json_schema", "schema": CITY}}
    formed = await claude.messages.create(**arguments_of(**BODY, output_config=output))
    assert json.loads(formed.content[0].text)["city"] in ("Bonn", "Rome")
    stopped = await claude.messages.create(**arguments_of(**BODY, stop_sequences=["seven"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "seven")
    cut = await claude.messages.create(**arguments_of(**BODY | {"max_tokens": 3}))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    full = await claude.messages.create(**arguments_of(**BODY | {"max_tokens": 90_000}, ignore_eos=True))
    assert full.stop_reason == "model_context_window_exceeded"


async def test_a_stream_cut_at_every_event_gives_exactly_the_rest(http: httpx.AsyncClient) -> None:
    whole = await read_frames(http, WITH_CALL)
    assert [event.kind for event in whole[:2]] == ["message_start", "ping"]
    assert whole[-1].data == {"type": "message_stop"}
    numbered = [(i, event.event_id) for i, event in enumerate(whole, start=1) if event.event_id is not None]
    assert len(numbered) == len(whole) - 1 > 10
    for i, event_id in numbered:
        rest = await read_frames(http, WITH_CALL, event_id)
        assert characters_of(rest) == characters_of(whole[i:])


async def test_a_running_stream_is_resumed_after_the_death_of_its_worker(
    http: httpx.AsyncClient, deployment: LocalStack, gate: Gate
) -> None:
    body = {**BODY, "max_tokens": 200, "ignore_eos": True, "stream": True}
    undisturbed = await read_frames(http, body)
    gate.hold_at(20)
    first = await read_frames(http, body, limit=5)
    (beat,) = (await beats(deployment.url)).values()
    os.kill(beat.worker_pid, signal.SIGKILL)
    gate.open()
    rest = await read_frames(http, body, first[-1].event_id)
    pieces = [piece for piece in characters_of(first) + characters_of(rest) if isinstance(piece, tuple)]
    assert pieces == [piece for piece in characters_of(undisturbed) if isinstance(piece, tuple)]
    kinds = [event.kind for event in first + rest if event.kind not in ("ping", "content_block_delta")]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert rest[-2].data["delta"]["stop_reason"] == "max_tokens"


async def test_a_request_cancelled_within_its_stream_ends_it_with_an_error(
    http: httpx.AsyncClient, client: Client, gate: Gate
) -> None:
    gate.hold_at(5)
    body = {**BODY, "max_tokens": 200, "ignore_eos": True, "stream": True}
    events: list[dict[str, Any]] = []
    async with http.stream("POST", "/v1/messages", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if events[-1]["type"] == "message_start":
                    await client.cancel(events[-1]["message"]["id"])
    assert [event["type"] for event in events].count("error") == 1
    assert events[-1]["type"] == "error"
    assert events[-1]["request_id"] == response.headers["request-id"]


async def test_a_stream_that_expires_ends_in_order(http: httpx.AsyncClient, gate: Gate) -> None:
    gate.hold_at(5)
    frames = await read_frames(http, {**BODY, "ignore_eos": True, "stream": True, "timeout_s": 1.0})
    assert [frame.kind for frame in frames[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert frames[-2].data["delta"]["stop_reason"] == "max_tokens"


@pytest.fixture
def pinging(deployment: LocalStack, tmp_path: Path) -> Iterator[LocalGateway]:
    """A gateway whose streams are never without an event for long."""
    with LocalGateway(deployment.url, ["--keep-alive", "0.05"], tmp_path / "gateway.log") as gateway:
        yield gateway


async def test_a_stream_is_kept_alive_by_pings(pinging: LocalGateway, gate: Gate) -> None:
    gate.hold_at(3)
    async with httpx.AsyncClient(base_url=pinging.root_url, timeout=DEADLINE_S) as http:
        frames = await read_frames(http, {**BODY, "stream": True}, limit=9)
    assert [event.kind for event in frames].count("ping") >= 3


async def test_errors_are_the_sdks_exception_classes(claude: AsyncAnthropic, http: httpx.AsyncClient) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature must be") as invalid:
        await claude.messages.create(**arguments_of(**BODY | {"temperature": 3000}))
    assert invalid.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]  # JSON, untyped
    assert invalid.value.body["request_id"] == invalid.value.request_id  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(**arguments_of(**BODY | {"model": "no-such-model"}, stream=True))
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2048 maximum"):
        await claude.messages.create(
            **arguments_of(**BODY | {"messages": [{"role": "user", "content": "x" * 9000}]}, stream=True)
        )
    with pytest.raises(anthropic.RequestTooLargeError):
        await claude.messages.create(
            **arguments_of(**BODY | {"messages": [{"role": "user", "content": "x" * 300_000}]})
        )
    for body, headers in ((b"[", {}), (b"{}", {}), (json.dumps(WITH_CALL).encode(), {"Last-Event-ID": "msg_1:x"})):
        refused = await http.post("/v1/messages", content=body, headers=headers)
        assert (refused.status_code, refused.json()["type"]) == (400, "error")
    unknown = await http.get("/v1/messages/nothing")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")


async def test_a_full_queue_is_a_rate_limit_error(client: Client, claude: AsyncAnthropic) -> None:
    policy = await client.queue_policy()
    await client.pause_generation()
    try:
        await client.configure_queue(QueuePolicy(tenant=TenantPolicy(max_queue_depth=1)))
        waiting = await client.submit(COUNT)
        with pytest.raises(anthropic.RateLimitError) as caught:
            await claude.messages.create(**arguments_of(**BODY, stream=True))
        assert int(caught.value.response.headers["retry-after"]) >= 1
    finally:
        await client.configure_queue(policy)
        await client.resume_generation()
    await waiting.result()


async def test_fields_without_effect_are_named(http: httpx.AsyncClient) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    fields = {"context_management": {"edits": []}, "tools": [search], "metadata": {"user_id": "u"}}
    answer = await http.post("/v1/messages?beta=true", json=BODY | fields)
    assert answer.status_code == 200
    assert answer.headers["x-penstock-ignored"] == "context_management,tools.web_search"


async def test_models_in_the_form_of_the_caller(claude: AsyncAnthropic, http: httpx.AsyncClient) -> None:
    (model,) = (await claude.models.list()).data
    assert (model.id, model.type, model.max_input_tokens, model.lifecycle) == ("demo", "model", 2048, "active")
    assert (await claude.models.retrieve("demo")).created_at == model.created_at
    assert (await http.get("/v1/models")).json()["object"] == "list"
    for method in ("HEAD", "GET"):
        assert (await http.request(method, "/")).status_code == 200
