"""Events of a response: their order, their numbers, and that neither depends on how the generation was cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.producer.openai.answers.parts import MessageParts
from penstock.producer.openai.responses.objects import Event, Response
from penstock.producer.openai.responses.offered_tools import OfferedTool
from penstock.producer.openai.responses.transcriber import ParsingOptions, Transcriber
from penstock.shared.errors import EngineDeadError, PromptTooLongError, QueueFullError
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, RequestError, TokenLogprobs, Usage
from penstock.shared.stats import RequestStats

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEXT = "?hm, a sum<six {7} f(a)<g()>!"
PATCH = '*** Begin "Patch"\n+\U0001f600\\'
# Calls of a custom tool, a search, a function within a namespace, and one that was not offered.
CALLS = f"?hm<x({json.dumps({'input': PATCH})})y({json.dumps({'query': 'files'})})(a)(b)"
TOOLS = [
    OfferedTool(flat_name="f0", kind="custom", name="patch"),
    OfferedTool(flat_name="f1", kind="tool_search", name="tool_search"),
    OfferedTool(flat_name="f2", kind="function", name="spawn", namespace="agents"),
]


class Marks:
    """A parser with marks of a character: thoughts from "?" to "<", calls from "(" to ")"; "!" is held back."""

    def __init__(self) -> None:
        self._mode = "text"
        self._held = ""
        self._num_calls = 0

    def begin(self, *, in_reasoning: bool | None) -> None:
        self._mode = "thought" if in_reasoning else "text"

    def feed(self, text: str) -> MessageParts:
        parts = MessageParts(tool_calls=[])
        for char in text:
            self._read(char, parts)
        return parts

    def finish(self, *, is_cut: bool = False) -> MessageParts:
        return MessageParts(self._held)

    def finish_reason(self, reason: Any) -> Any:
        return reason

    def _read(self, char: str, parts: MessageParts) -> None:
        if char == "!":
            self._held += char
        elif char == "?":
            self._mode = "thought"
        elif char == "<":
            self._mode = "text"
        elif char == "(":
            self._mode = "call"
            n = self._num_calls
            parts.tool_calls.append({"index": n, "function": {"name": f"f{n}", "arguments": ""}})
        elif char == ")":
            self._mode, self._num_calls = "text", self._num_calls + 1
        elif self._mode == "thought":
            parts.reasoning += char
        elif self._mode == "call":
            parts.tool_calls.append({"index": self._num_calls, "function": {"arguments": char}})
        else:
            parts.content += char


def new_response(**fields: Any) -> Response:
    return Response(id="resp_ab", created_at=1000, status="queued", model="demo", **fields)


def new_transcriber(
    *, after: int = -1, num_top_logprobs: int | None = None, tools: list[OfferedTool] | None = None, **fields: Any
) -> Transcriber:
    options = ParsingOptions(
        parser=Marks(),
        call_id="call_{}".format,
        num_top_logprobs=num_top_logprobs,
        tools={tool.flat_name: tool for tool in tools or ()},
    )
    return Transcriber(new_response(**fields), options, after=after)


def deltas_of(pieces: list[str], reason: FinishReason = FinishReason.STOP) -> list[Delta]:
    """A token for each character, a delta for each piece, and the end."""
    deltas, index = [], 0
    for piece in pieces:
        deltas.append(Delta(index=index, token_ids=[1] * len(piece), text=piece))
        index += len(piece)
    stats = RequestStats(latency_s=2.25)
    deltas.append(Delta(index=index, finish_reason=reason, usage=Usage(7, index, 3), stats=stats))
    return deltas


def transcribe(deltas: list[Delta], *, after: int = -1, **fields: Any) -> tuple[list[Event], Response]:
    transcriber = new_transcriber(after=after, **fields)
    events = transcriber.create()
    for delta in deltas:
        events += transcriber.feed(delta)
    return events, transcriber.response


def told(events: list[Event]) -> list[dict[str, Any]]:
    """Return the events as a client reads them."""
    return [msgspec.json.decode(msgspec.json.encode(event)) for event in events]


def by_character(events: list[dict[str, Any]]) -> dict[int, Any]:
    """Return the content of each number: events, and each character of a delta."""
    at: dict[int, Any] = {}
    for event in events:
        number = event["sequence_number"]
        if not event["type"].endswith(".delta"):
            assert number not in at
            at[number] = event
            continue
        for i, char in enumerate(reversed(event["delta"])):
            assert number - i not in at
            at[number - i] = (event["type"], event["item_id"], char)
    return at


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


def test_the_first_delta_reports_whether_the_text_begins_in_reasoning() -> None:
    begun, *rest = deltas_of(["hm", "<six"])
    _, response = transcribe([msgspec.structs.replace(begun, begins_in_reasoning=True), *rest])
    assert [type(item).__name__ for item in response.output] == ["Reasoning", "Message"]
    _, response = transcribe([msgspec.structs.replace(begun, begins_in_reasoning=False), *rest])
    assert [type(item).__name__ for item in response.output] == ["Message"]


def test_every_event_has_openais_order_and_form() -> None:
    events, _ = transcribe(deltas_of(["?hm<si", "x.", "(a", "b)"]))
    types = [event["type"].removeprefix("response.") for event in told(events)]
    assert types == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    for event in told(events):
        EVENTS.validate_python(event)


def test_the_last_event_has_the_whole_response() -> None:
    events, response = transcribe(deltas_of(["?hm<six", "(ab)"]))
    last = OpenAIResponse.model_validate(told(events)[-1]["response"])
    assert last.output_text == "six"
    assert last.status == "completed"
    assert last.completed_at == 1002
    assert [item.type for item in last.output] == ["reasoning", "message", "function_call"]
    assert [item.id for item in last.output] == ["rs_ab_0", "msg_ab_1", "fc_ab_2"]
    assert last.usage is not None
    assert (last.usage.input_tokens, last.usage.output_tokens, last.usage.total_tokens) == (7, 11, 18)
    assert last.usage.input_tokens_details.cached_tokens == 3
    assert last.usage.output_tokens_details.reasoning_tokens == 3  # 2 of 5 characters, of 7 tokens: 2.8
    assert msgspec.to_builtins(response) == told(events)[-1]["response"]


def test_calls_have_the_kind_that_their_tools_were_offered_as() -> None:
    events, response = transcribe(deltas_of([CALLS]), tools=TOOLS)
    _, _, patch, _, search, spawn, unknown = msgspec.to_builtins(response.output)
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", PATCH)
    assert (search["type"], search["execution"]) == ("tool_search_call", "client")
    assert search["arguments"] == {"query": "files"}
    assert (spawn["type"], spawn["name"], spawn["namespace"]) == ("function_call", "spawn", "agents")
    assert (unknown["type"], unknown["name"]) == ("function_call", "f3")
    assert "namespace" not in unknown
    assert [item["id"] for item in (patch, search, spawn)] == ["ctc_ab_2", "tsc_ab_4", "fc_ab_5"]
    types = [event["type"] for event in told(events) if event.get("output_index") in (2, 4)]
    assert types == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.output_item.done",
    ]
    for event in told(events):
        EVENTS.validate_python(event)


@pytest.mark.parametrize("text", [TEXT, CALLS])
@given(places=st.lists(st.integers(0, 120)), after=st.integers(-1, 120), other=st.lists(st.integers(0, 120)))
def test_numbers_do_not_depend_on_the_cut_and_any_reader_resumes_exactly(
    text: str, places: list[int], after: int, other: list[int]
) -> None:
    whole, response = transcribe(deltas_of([text]), tools=TOOLS)
    events, same = transcribe(deltas_of(cut(text, places)), tools=TOOLS)
    expected = by_character(told(whole))
    assert by_character(told(events)) == expected | {max(expected): told(events)[-1]}
    assert msgspec.structs.replace(same, usage=None) == msgspec.structs.replace(response, usage=None)
    assert sorted(expected) == list(range(len(expected)))  # no number is left out
    rest = by_character(told(transcribe(deltas_of(cut(text, other)), after=after, tools=TOOLS)[0]))
    assert rest.keys() == {number for number in expected if number > after}
    assert all(rest[number] == expected[number] for number in rest if number < max(expected))


def test_a_background_response_is_queued_until_its_first_token() -> None:
    transcriber = new_transcriber(background=True)
    assert [event["type"] for event in told(transcriber.create())] == ["response.created", "response.queued"]
    assert transcriber.response.status == "queued"
    first = told(transcriber.feed(Delta(token_ids=[5])))
    assert [(event["type"], event["sequence_number"]) for event in first] == [("response.in_progress", 2)]
    assert transcriber.response.status == "in_progress"
    transcriber.feed(Delta(index=1, token_ids=[6], text="si"))
    assert msgspec.to_builtins(transcriber.response.output[0])["status"] == "in_progress"


@pytest.mark.parametrize(
    ("reason", "event", "status", "item_status"),
    [
        (FinishReason.STOP, "response.completed", "completed", "completed"),
        (FinishReason.REPETITION, "response.completed", "completed", "completed"),
        (FinishReason.LENGTH, "response.incomplete", "incomplete", "incomplete"),
        (FinishReason.CANCELLED, "response.incomplete", "cancelled", "incomplete"),
        (FinishReason.EXPIRED, "response.incomplete", "incomplete", "incomplete"),
        (FinishReason.ENGINE_LOST, "response.failed", "failed", "incomplete"),
    ],
)
def test_each_end_has_its_status(reason: FinishReason, event: str, status: str, item_status: str) -> None:
    events, response = transcribe(deltas_of(["si"], reason))
    assert told(events)[-1]["type"] == event
    assert response.status == status
    assert msgspec.to_builtins(response.output[0])["status"] == item_status
    assert (response.incomplete_details is not None) == (status == "incomplete")
    assert (response.error is not None) == (status == "failed")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDeadError("gone"), "server_error"),
        (PromptTooLongError("too long"), "invalid_prompt"),
        (QueueFullError("full", retry_after_s=1), "rate_limit_exceeded"),
    ],
)
def test_an_error_is_the_end(error: Any, code: str) -> None:
    transcriber = new_transcriber()
    transcriber.create()
    (event,) = told(transcriber.fail(error))
    assert event["type"] == "response.failed"
    assert event["response"]["error"] == {"code": code, "message": str(error)}


def test_an_error_in_the_log_is_the_end() -> None:
    error = RequestError("prompt_too_long", "too long")
    events, response = transcribe([Delta(finish_reason=FinishReason.ERROR, error=error)])
    assert told(events)[-1]["type"] == "response.failed"
    assert response.error is not None
    assert response.error.code == "invalid_prompt"


def test_log_probabilities_arrive_with_the_text_of_their_tokens() -> None:
    def token(text: str) -> TokenLogprobs:
        return TokenLogprobs(1, -0.5, 1, [(1, -0.5)], [text.encode(), text.encode()])

    deltas = [
        Delta(token_ids=[1], text="?hm<", logprobs=[token("hm")]),
        Delta(index=1, token_ids=[1], text="", logprobs=[token("si")]),
        Delta(index=2, token_ids=[1, 1], text="sixty ", logprobs=[token("xt"), token("y ")]),
        Delta(index=4, finish_reason=FinishReason.STOP),
    ]

    def tokens(after: int) -> list[str]:
        transcriber = new_transcriber(num_top_logprobs=1, after=after)
        transcriber.create()
        told_events = told([event for delta in deltas for event in transcriber.feed(delta)])
        texts = [event for event in told_events if event["type"] == "response.output_text.delta"]
        return [token["token"] for event in texts for token in event["logprobs"]]

    whole, _ = transcribe(deltas)
    number = next(event.sequence_number for event in whole if "sixty " in str(getattr(event, "delta", "")))
    assert tokens(-1) == ["si", "xt", "y "]
    assert tokens(number - 2) == ["y "]  # two characters are missing
