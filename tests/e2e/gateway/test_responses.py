"""The Responses API through the real openai package, against a running gateway."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client
from penstock.producer.openai.errors import OpenAIError
from penstock.producer.openai.parsers import ModelParsers, ParserChoice
from penstock.producer.openai.responses.body import ResponseBody
from penstock.producer.openai.responses.service import Responses
from penstock.producer.webhooks.events import event_of
from penstock.producer.webhooks.secrets import SecretStore
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys

from ...gate import Gate
from ...processes import DEADLINE_S

pytestmark = pytest.mark.xdist_group("deployment")

COUNT = "count from one to nine:"
COUNTED = " one two three four five six seven eight nine."
LONG: dict[str, Any] = {"model": "demo", "input": "spell 407:", "extra_body": {"ignore_eos": True}}


@pytest.fixture
async def ai(gateway: LocalGateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=gateway.base_url, api_key="any", max_retries=0, timeout=DEADLINE_S) as ai:
        yield ai


@pytest.fixture
async def responses(client: Client, deployment: LocalStack) -> AsyncIterator[Responses]:
    """The gateway's responses, on the same Redis."""
    commands = CommandConnection(deployment.url)
    parsers = ModelParsers(client, ParserChoice())
    yield Responses(client, commands, Keys(), parsers, result_ttl_s=60)
    await commands.close()


def by_character(events: list[Any]) -> dict[int, Any]:
    """Return the content of each sequence number: events, and each character of a delta."""
    at: dict[int, Any] = {}
    for event in events:
        text = event.delta if event.type.endswith(".delta") else "?"
        for i, char in enumerate(reversed(text)):
            assert event.sequence_number - i not in at
            at[event.sequence_number - i] = (event.type, char)
    return at


async def events_of(stream: Any) -> list[Any]:
    return [event async for event in stream]


async def status_of(ai: AsyncOpenAI, response_id: str, status: str) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        while (response := await ai.responses.retrieve(response_id)).status != status:
            assert response.status in ("queued", "in_progress"), response
            await asyncio.sleep(0.02)
    return response


async def test_a_response_is_stored_and_continued(ai: AsyncOpenAI, responses: Responses) -> None:
    first = await ai.responses.create(
        model="demo", input="four plus two is", temperature=0, metadata={"k": "v"}, instructions="answer"
    )
    assert (first.status, first.metadata) == ("completed", {"k": "v"})
    assert first.usage is not None
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    assert await ai.responses.retrieve(first.id) == first

    second = await ai.responses.create(
        model="demo", input="spell 7:", temperature=0, max_output_tokens=1, previous_response_id=first.id
    )
    assert (second.status, second.previous_response_id) == ("incomplete", first.id)
    assert second.incomplete_details is not None
    assert second.incomplete_details.reason == "max_output_tokens"
    items = [item async for item in ai.responses.input_items.list(second.id)]
    assert [(item.type, item.content[0].text) for item in items] == [("message", "spell 7:")]  # type: ignore[union-attr]  # asserted

    await ai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await ai.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await ai.responses.create(model="demo", input="x", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"

    body = ResponseBody(model="demo", input="spell 8:", previous_response_id=second.id)
    prompt: Any = (await responses.prepare("default", body)).chat.prompt
    # The turns before the deleted one are known all the same; its instructions are not.
    assert [message["content"] for message in prompt] == [
        "four plus two is",
        first.output_text,
        "spell 7:",
        second.output_text,
        "spell 8:",
    ]


async def test_the_response_of_a_tenant_is_unknown_to_another(ai: AsyncOpenAI, responses: Responses) -> None:
    stored = await ai.responses.create(model="demo", input="spell 7:", max_output_tokens=1)
    assert (await responses.retrieve("default", stored.id)).id == stored.id
    for attempt in (responses.retrieve, responses.cancel, responses.delete, responses.input_items):
        with pytest.raises(OpenAIError) as caught:
            await attempt("other", stored.id)
        assert caught.value.status == 404
    unkept = await ai.responses.create(model="demo", input="spell 7:", max_output_tokens=1, store=False)
    with pytest.raises(openai.NotFoundError):
        await ai.responses.retrieve(unkept.id)


async def test_a_stream_can_be_read_again_from_any_number(ai: AsyncOpenAI) -> None:
    async with ai.responses.stream(model="demo", input=COUNT, temperature=0) as stream:
        events = await events_of(stream)
        final = await stream.get_final_response()
    assert final.output_text == COUNTED
    types = [event.type for event in events]
    assert types[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert types[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    whole = by_character(events)
    assert sorted(whole) == list(range(len(whole)))
    for after in (0, 3, 10, len(COUNTED), len(whole) - 2, len(whole) + 5):
        rest = await events_of(await ai.responses.retrieve(final.id, stream=True, starting_after=after))
        assert by_character(rest) == {number: item for number, item in whole.items() if number > after}


async def test_the_background_runs_without_a_reader_and_is_followed_by_any(ai: AsyncOpenAI) -> None:
    begun = await ai.responses.create(**LONG, background=True, max_output_tokens=300, temperature=1)
    assert begun.status == "queued"
    early = await ai.responses.retrieve(begun.id, stream=True)
    events: list[Any] = []
    async for event in early:
        events.append(event)
        if len(events) == 7:
            break
    await early.close()
    readers = [
        await ai.responses.retrieve(begun.id, stream=True, starting_after=events[-1].sequence_number),
        await ai.responses.retrieve(begun.id, stream=True),
    ]
    rest, other = await asyncio.gather(*[events_of(reader) for reader in readers])
    assert by_character(events) | by_character(rest) == by_character(other)
    assert by_character(events).keys().isdisjoint(by_character(rest))
    final = await status_of(ai, begun.id, "incomplete")
    assert final == other[-1].response
    assert len(final.output_text) > 100


async def test_a_background_response_is_cancelled(ai: AsyncOpenAI, gate: Gate) -> None:
    gate.hold_at(20)
    stream = await ai.responses.create(**LONG, background=True, stream=True, temperature=1, max_output_tokens=1800)
    first: Any = await anext(aiter(stream))
    cancelled = await ai.responses.cancel(first.response.id)
    assert cancelled.status == "cancelled"
    assert (await ai.responses.cancel(first.response.id)).status == "cancelled"
    last = (await events_of(stream))[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    with pytest.raises(openai.BadRequestError):
        await ai.responses.create(model="demo", input="x", previous_response_id=first.response.id)


class Weather(BaseModel):
    city: Literal["rome", "oslo"]
    is_hot: bool


async def test_an_answer_is_parsed_by_a_model_of_pydantic(ai: AsyncOpenAI) -> None:
    response = await ai.responses.parse(model="demo", input="weather?", text_format=Weather)
    assert response.status == "completed", response
    assert isinstance(response.output_parsed, Weather)


async def test_a_function_is_called_and_its_output_sent_back(ai: AsyncOpenAI) -> None:
    tool: Any = {
        "type": "function",
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"hot": {"type": "boolean"}},
            "required": ["hot"],
            "additionalProperties": False,
        },
    }
    called = await ai.responses.create(
        model="demo", input="weather?", tools=[tool], tool_choice={"type": "function", "name": "weather"}
    )
    (call,) = called.output
    assert call.type == "function_call"
    assert (call.name, call.status) == ("weather", "completed")
    assert json.loads(call.arguments) in ({"hot": True}, {"hot": False})
    response = await ai.responses.create(
        model="demo",
        previous_response_id=called.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
        max_output_tokens=3,
    )
    assert response.status in ("completed", "incomplete")


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model"),
        ({"input": [{"type": "no_such_item"}]}, openai.BadRequestError, "input[0].type"),
        ({"input": "one " * 3000}, openai.BadRequestError, None),
        ({"input": "one " * 3000, "stream": True}, openai.BadRequestError, None),
    ],
)
async def test_impossible_values_are_refused(
    ai: AsyncOpenAI, fields: dict[str, Any], error: type[openai.APIStatusError], param: str | None
) -> None:
    body: dict[str, Any] = {"model": "demo", "input": "x", **fields}
    with pytest.raises(error) as caught:
        await ai.responses.create(**body)
    if param is not None:
        assert caught.value.param == param


async def test_a_webhook_uses_openais_event_names(ai: AsyncOpenAI, deployment: LocalStack) -> None:
    """The event is checked in the outbox; other tests check how jobs deliver it."""
    commands, keys = CommandConnection(deployment.url), Keys()
    hook = {"webhook_url": "https://example.org/hook"}
    body: dict[str, Any] = {"model": "demo", "input": COUNT, "background": True, "extra_body": hook}
    with pytest.raises(openai.BadRequestError, match="webhook_url"):
        await ai.responses.create(**body)  # the tenant has no secret to sign with
    secrets = SecretStore(commands, keys)
    await secrets.create("default")
    response = await ai.responses.create(**body, max_output_tokens=2)
    await status_of(ai, response.id, "incomplete")
    await secrets.delete("default")
    entries = await commands.execute("XRANGE", keys.model("demo").outbox, "-", "+")
    events = [event_of(dict(zip(fields[::2], fields[1::2], strict=True))) for _, fields in entries]
    await commands.close()
    (event,) = [event for event in events if response.id in event.body]
    assert (event.type, event.url, event.tenant) == ("response.incomplete", hook["webhook_url"], "default")
    assert json.loads(event.body)["data"] == {"id": response.id}


async def test_a_killed_gateway_takes_no_event_with_it(
    ai: AsyncOpenAI, deployment: LocalStack, client: Client, gate: Gate, tmp_path: Path
) -> None:
    """Two streams, one of them in the background, begin at a gateway that is killed with -9, and go on at another."""
    doomed = LocalGateway(deployment.url, ["--lease-ttl", "60"], tmp_path / "doomed.log")
    gate.hold_at(200)
    await asyncio.to_thread(doomed.start)
    try:
        async with AsyncOpenAI(base_url=doomed.base_url, api_key="any", max_retries=0, timeout=DEADLINE_S) as there:
            body = {**LONG, "stream": True, "temperature": 1, "max_output_tokens": 1500}
            streams: list[Any] = [await there.responses.create(**body, background=b) for b in (True, False)]
            # In a delta of one piece the fifth event is the first that has text.
            parts = await asyncio.gather(*[some_of(stream, 5) for stream in streams])
            await client.pause_generation()
            await asyncio.to_thread(doomed.kill)
            for stream in streams:
                await stream.close()
        stored = await asyncio.gather(*[ai.responses.retrieve(events[0].response.id) for events in parts])
        assert {response.status for response in stored} <= {"queued", "in_progress"}
    finally:
        await client.resume_generation()
        gate.open()
        await asyncio.to_thread(doomed.stop)
    for events in parts:
        response_id, last = events[0].response.id, events[-1].sequence_number
        rest = await events_of(await ai.responses.retrieve(response_id, stream=True, starting_after=last))
        whole = await events_of(await ai.responses.retrieve(response_id, stream=True))
        assert by_character(events).keys().isdisjoint(by_character(rest))
        assert by_character(events) | by_character(rest) == by_character(whole)
        assert rest[-1].response.usage.output_tokens == 1500


async def some_of(stream: Any, num_events: int) -> list[Any]:
    """The first events; the stream stays open."""
    events = []
    async for event in stream:
        events.append(event)
        if len(events) == num_events:
            break
    return events


async def test_references_name_items_of_stored_responses(ai: AsyncOpenAI, responses: Responses) -> None:
    """The AI SDK sends what the server has stored as references."""
    first = await ai.responses.create(model="demo", input="four plus two is", temperature=0)
    (answer,) = first.output
    (question,) = [item async for item in ai.responses.input_items.list(first.id)]
    references: Any = [{"type": "item_reference", "id": question.id}, {"id": answer.id}]
    items = [*references, {"role": "user", "content": "spell 7:"}]
    prepared = await responses.prepare("default", ResponseBody(model="demo", input=items))
    prompt: Any = prepared.chat.prompt
    assert [message["content"] for message in prompt] == ["four plus two is", first.output_text, "spell 7:"]
    second = await ai.responses.create(model="demo", input=items, temperature=0)
    assert second.status == "completed"
    assert (await responses.retrieve("default", second.id)).status == "completed"

    await ai.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await ai.responses.create(model="demo", input=items)
    assert caught.value.param == "input[0].id"
    with pytest.raises(OpenAIError):  # of another tenant
        await responses.prepare(
            "other", ResponseBody(model="demo", input=[{"type": "item_reference", "id": answer.id}])
        )


@pytest.mark.parametrize("kind", ["function", "custom"])
async def test_references_name_calls_of_stored_responses(ai: AsyncOpenAI, responses: Responses, kind: str) -> None:
    """The loop of tools of the AI SDK: a reference to the call, and its output."""
    schema = {"type": "object", "properties": {"input": {"const": "a"}}, "required": ["input"]}
    form = {"type": "grammar", "syntax": "regex", "definition": "a"}
    tool = {"type": kind, "name": "note"} | ({"parameters": schema} if kind == "function" else {"format": form})
    body: Any = {"model": "demo", "tools": [{"type": "namespace", "name": "pad", "tools": [tool]}]}
    chosen: Any = {"type": kind, "name": "note", "namespace": "pad"}
    first: Any = await ai.responses.create(**body, input="note a:", tool_choice=chosen, parallel_tool_calls=False)
    (call,) = first.output
    assert (call.type.startswith(kind), call.name, call.namespace) == (True, "note", "pad")
    assert (call.input if kind == "custom" else json.loads(call.arguments)["input"]) == "a"
    output = {"type": f"{call.type}_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "ok"}]}
    items: Any = [{"role": "user", "content": "note a:"}, {"type": "item_reference", "id": call.id}, output]
    prepared = await responses.prepare("default", ResponseBody(**body, input=items))
    prompt: Any = prepared.chat.prompt
    function = prompt[1]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("pad__note", {"input": "a"})
    assert (prompt[2]["content"], prompt[2]["tool_call_id"]) == ("ok", call.call_id)
    second = await ai.responses.create(**body, input=items, tool_choice="none", max_output_tokens=3)
    assert second.status in ("completed", "incomplete")


async def test_tools_that_run_elsewhere_are_named_in_a_header(ai: AsyncOpenAI) -> None:
    tools: Any = [{"type": "web_search"}, {"type": "custom", "name": "note"}]
    body: Any = {"model": "demo", "input": COUNT, "tools": tools, "extra_body": {"client_metadata": {"a": "b"}}}
    reply = await ai.responses.with_raw_response.create(**body, tool_choice="none")
    assert reply.headers["x-penstock-ignored"] == "client_metadata,tools.web_search"
    assert reply.parse().tools[0].type == "web_search"
    forced = await ai.responses.create(**body, tool_choice={"type": "custom", "name": "note"}, max_output_tokens=200)
    assert forced.output[0].type == "custom_tool_call"


NOTE: dict[str, Any] = {"type": "custom", "name": "note"}
LINES = {
    "lark": 'start: "*** Begin" LF line~1..4 "*** \\"End\\""\nline: /[+-][a-f]{1,4}/ LF\n%import common.LF\n',
    "regex": r'\*\*\* Begin\n([+-][a-f]{1,4}\n){1,4}\*\*\* "End"',
}


@pytest.mark.parametrize("syntax", ["lark", "regex"])
async def test_the_input_of_a_custom_tool_follows_its_grammar(ai: AsyncOpenAI, syntax: str) -> None:
    tool = NOTE | {"format": {"type": "grammar", "syntax": syntax, "definition": LINES[syntax]}}
    body: Any = {"model": "demo", "input": COUNT, "tools": [tool], "temperature": 1.5, "max_output_tokens": 400}
    for seed, choice in enumerate(({"type": "custom", "name": "note"}, "required")):
        body |= {"tool_choice": choice, "parallel_tool_calls": False, "extra_body": {"seed": seed}}
        events: list[Any] = [event async for event in await ai.responses.create(**body, stream=True)]
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        (item,) = events[-1].response.output
        assert (item.type, item.name, item.input) == ("custom_tool_call", "note", "".join(deltas))
        assert re.fullmatch(LINES["regex"], item.input)
    custom = {"name": "note", "format": {"type": "grammar", "grammar": tool["format"]}}
    body = {"model": "demo", "messages": [{"role": "user", "content": COUNT}], "max_tokens": 400}
    body |= {"tools": [{"type": "custom", "custom": custom}], "tool_choice": {"type": "custom", "custom": custom}}
    completion = await ai.chat.completions.create(**body)
    (call,) = completion.choices[0].message.tool_calls
    assert (call.type, call.custom.name) == ("custom", "note")
    assert re.fullmatch(LINES["regex"], call.custom.input)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(("syntax", "definition"), [("lark", 'start: "a" nope'), ("regex", "(a")])
async def test_a_grammar_that_is_invalid_is_refused(ai: AsyncOpenAI, choice: Any, syntax: str, definition: str) -> None:
    tool: Any = NOTE | {"format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    chat_tool: Any = {"type": "custom", "custom": {"name": "note", "format": tool["format"]}}
    messages: Any = [{"role": "user", "content": COUNT}]
    calls = [
        ai.chat.completions.create(model="demo", messages=messages, tools=[chat_tool], tool_choice=choice),
        ai.responses.create(model="demo", input=COUNT, tools=[tool], tool_choice=choice),
    ]
    for call in calls:
        with pytest.raises(openai.BadRequestError, match="tools: the grammar of 'note'") as caught:
            await call
        assert caught.value.param == "tools"
