"""Tools, structured outputs and reasoning through the gateway, with the `openai` package and the demo model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from openai import AsyncOpenAI

from penstock.ops.local.server import LocalGateway

from ...processes import DEADLINE_S

pytestmark = pytest.mark.xdist_group("deployment")

MESSAGES: Any = [{"role": "user", "content": "four plus two is"}]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": CITY}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
HERMES = r'I look\. <tool_call>\{"name": "weather", "arguments": \{"city": "(Bonn|Rome)"\}\}</tool_call>'
SPEAKS_HERMES = {"structured_outputs": {"regex": HERMES}}
LIMIT = 120


@pytest.fixture
async def ai(gateway: LocalGateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=gateway.base_url, api_key="none", max_retries=0) as ai:
        yield ai


def check_weather(calls: Any) -> None:
    for call in calls:
        assert (call.type, call.function.name) == ("function", "weather")
        assert json.loads(call.function.arguments) in ({"city": "Bonn"}, {"city": "Rome"})
    assert len({call.id for call in calls}) == len(calls) > 0


@pytest.mark.parametrize(
    ("choice", "extra"),
    [("auto", SPEAKS_HERMES), ("required", {}), ({"type": "function", "function": {"name": "weather"}}, {})],
    ids=["auto", "required", "named"],
)
async def test_calls_are_returned_whole_and_streamed(ai: AsyncOpenAI, choice: Any, extra: dict[str, Any]) -> None:
    body: dict[str, Any] = {
        "model": "demo",
        "messages": MESSAGES,
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "seed": 1,
        "max_tokens": LIMIT,
        "extra_body": extra,
    }

    async def streamed() -> Any:
        async with ai.chat.completions.stream(**body) as events:
            names = [event.type async for event in events]
            assert "tool_calls.function.arguments.delta" in names
            return (await events.get_final_completion()).choices[0]

    whole, choice_of_stream = await asyncio.gather(ai.chat.completions.create(**body), streamed())
    for answer in (whole.choices[0], choice_of_stream):
        assert answer.finish_reason == "tool_calls"
        check_weather(answer.message.tool_calls)
        assert (answer.message.content or "") == ("I look." if extra else "")
    # The conversation continues with the call and its result.
    call = whole.choices[0].message.tool_calls[0]
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
    message = whole.choices[0].message.model_dump(exclude_none=True)
    after = await ai.chat.completions.create(
        model="demo",
        messages=[*MESSAGES, message, result],
        tools=[WEATHER],
        tool_choice="none",
        temperature=0,
        max_tokens=LIMIT,
    )
    assert (after.choices[0].message.content, after.choices[0].finish_reason) == (" six.", "stop")


async def test_tools_that_the_chat_template_cannot_show_are_refused(ai: AsyncOpenAI) -> None:
    """The model would answer in prose, and its caller would not know why."""
    body: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "tools": [WEATHER], "max_tokens": LIMIT}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="tools: the chat template of this model cannot show tools"):
            await ai.chat.completions.create(**body, stream=stream)


async def test_several_calls_are_numbered_and_tool_choice_none_forbids_them(ai: AsyncOpenAI) -> None:
    two = f'{HERMES}\n<tool_call>{{"name": "now"}}</tool_call>'
    body: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "tools": [WEATHER, NOW], "max_tokens": 2 * LIMIT}
    forced = {"structured_outputs": {"regex": two.replace('{"name": "now"}', r'\{"name": "now"\}')}}

    async def chunks() -> list[Any]:
        stream = await ai.chat.completions.create(**body, stream=True, extra_body=forced)
        return [chunk.choices[0] async for chunk in stream if chunk.choices]

    with_call, none = await asyncio.gather(
        chunks(), ai.chat.completions.create(**body, tool_choice="none", extra_body=forced)
    )
    calls = [call for choice in with_call for call in choice.delta.tool_calls or ()]
    assert [(call.index, call.function.name) for call in calls if call.id] == [(0, "weather"), (1, "now")]
    assert "".join(call.function.arguments for call in calls if call.index == 1) == "{}"
    assert with_call[-1].finish_reason == "tool_calls"
    assert none.choices[0].message.tool_calls is None
    assert "<tool_call>" in (none.choices[0].message.content or "")


async def test_a_call_resumes_where_its_stream_was_cut(gateway: LocalGateway) -> None:
    body = {"model": "demo", "messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required", "stream": True}
    body |= {"parallel_tool_calls": False, "max_tokens": LIMIT, "seed": 3}
    deltas: list[dict[str, Any]] = []
    last_event_id = ""

    async def read(http: httpx.AsyncClient, num_events: int | None, headers: dict[str, str]) -> None:
        nonlocal last_event_id
        async with http.stream("POST", "/chat/completions", json=body, headers=headers) as response:
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    last_event_id = line.removeprefix("id: ")
                elif line.startswith("data: {"):
                    deltas.append(json.loads(line.removeprefix("data: "))["choices"][0])
                    if len(deltas) == num_events:
                        return

    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=DEADLINE_S) as http:
        await read(http, 2, {})
        await read(http, None, {"Last-Event-ID": last_event_id})
    calls = [call for choice in deltas for call in choice["delta"].get("tool_calls", ())]
    assert [call["function"].get("name") for call in calls if "id" in call] == ["weather"]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) in ({"city": "Bonn"}, {"city": "Rome"})
    assert [choice["finish_reason"] for choice in deltas if choice["finish_reason"]] == ["tool_calls"]


class Step(pydantic.BaseModel):
    word: Literal["four", "two"]
    is_even: bool


class Sum(pydantic.BaseModel):
    steps: list[Step] = pydantic.Field(min_length=1, max_length=2)
    total: Literal["six", "seven"]


async def test_answers_and_arguments_are_parsed_into_pydantic_models(ai: AsyncOpenAI) -> None:
    tool = openai.pydantic_function_tool(Sum, name="sum")
    body: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": LIMIT, "seed": 2}
    # Each place of whitespace in a call may take a token.
    with_calls = body | {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
    whole, called = await asyncio.gather(
        ai.chat.completions.parse(**body, response_format=Sum),
        ai.chat.completions.parse(**with_calls),
    )
    assert isinstance(whole.choices[0].message.parsed, Sum)
    calls = called.choices[0].message.tool_calls or []
    assert [type(call.function.parsed_arguments) for call in calls] == [Sum]


async def test_a_schema_that_cannot_be_held_to_is_named(ai: AsyncOpenAI) -> None:
    def asking(schema: dict[str, Any], **options: Any) -> Any:
        described: Any = {"name": "list", "schema": schema, "strict": True}
        return ai.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": described},
            max_tokens=LIMIT,
            **options,
        )

    for schema, options, message in [
        ({"type": "text"}, {}, "type must be one or more of"),
        ({"type": "array", "uniqueItems": True}, {}, "uniqueItems is not supported"),
        ({"type": "array", "uniqueItems": True}, {"stream": True}, "uniqueItems is not supported"),
    ]:
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            await asking(schema, **options)
        assert str(caught.value.param).startswith("response_format.json_schema.schema")


async def test_reasoning_is_separated(ai: AsyncOpenAI) -> None:
    body: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": LIMIT}
    extra = {"structured_outputs": {"regex": "<think>\n(four|two) and more\n</think>\n\nsix!"}}

    async def streamed() -> list[Any]:
        stream = await ai.chat.completions.create(**body, stream=True, extra_body=extra)
        return [chunk.choices[0].delta async for chunk in stream]

    whole, deltas, without = await asyncio.gather(
        ai.chat.completions.create(**body, extra_body=extra),
        streamed(),
        ai.chat.completions.create(**body, extra_body={**extra, "include_reasoning": False}),
    )
    message: Any = whole.choices[0].message
    assert message.reasoning == message.reasoning_content
    assert message.reasoning in ("four and more", "two and more")
    assert message.content == without.choices[0].message.content == "six!"
    assert getattr(without.choices[0].message, "reasoning", None) is None
    assert "".join(delta.content or "" for delta in deltas) == "six!"
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas).endswith(" and more")


async def test_a_model_with_optional_tools_answers_in_the_requested_form_or_calls(ai: AsyncOpenAI) -> None:
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    body: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "tools": [strict], "response_format": Sum}
    body["parallel_tool_calls"] = False
    # The first character decides between both; the model's output is hot enough for either.
    seeds = [ai.chat.completions.parse(**body, max_tokens=LIMIT, seed=seed, temperature=5) for seed in range(16)]
    choices = [completion.choices[0] for completion in await asyncio.gather(*seeds)]
    for choice in choices:
        if choice.message.tool_calls:
            check_weather(choice.message.tool_calls)
            assert choice.finish_reason == "tool_calls"
        else:
            assert isinstance(choice.message.parsed, Sum)
    assert {bool(choice.message.tool_calls) for choice in choices} == {True, False}
