"""Events of a message: their order, their numbers, and that neither depends on how the generation was cut."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from penstock.producer.anthropic.errors import MESSAGES
from penstock.producer.anthropic.prepared import PreparedMessage
from penstock.producer.openai.endpoints import decode
from penstock.producer.openai.errors import OpenAIError
from penstock.producer.openai.parsers import Parsers
from penstock.producer.results import CompletionOutput, RequestOutput
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, Usage

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("weather", "now")]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TEXT = f"<think>hm, a\nsum</think>\n\nI look. {CALL}\n{NOW}\n"
NUMBERED = list[tuple[int, dict[str, Any]]]


def message_request(**fields: Any) -> PreparedMessage:
    body = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "Hot?"}], "tools": TOOLS}
    message = decode(MESSAGES, body | fields).prepare(Parsers("hermes", "qwen3"))
    assert isinstance(message, PreparedMessage)
    return message


def deltas_from(
    pieces: list[str], reason: FinishReason = FinishReason.STOP, stop_reason: str | None = None
) -> list[Delta]:
    """Return a token for each character, a delta for each piece, and the end."""
    deltas, index = [], 0
    for piece in pieces:
        deltas.append(Delta(index=index, token_ids=[1] * len(piece), text=piece))
        index += len(piece)
    if deltas:
        deltas[0].prompt_usage = Usage(7, 0, 3)
    return [*deltas, Delta(index=index, finish_reason=reason, stop_reason=stop_reason, usage=Usage(7, index, 3))]


def events_after(deltas: list[Delta], message: PreparedMessage | None = None, *, after: int = 0) -> NUMBERED:
    """Return the numbered events as a client reads them."""
    transcriber = (message or message_request()).transcriber("msg_ab", "m", after=after)
    events = [event for delta in deltas for event in transcriber.feed(delta)]
    return [(number, msgspec.json.decode(msgspec.json.encode(event))) for number, event in events]


def whole_answer(deltas: list[Delta], message: PreparedMessage | None = None) -> dict[str, Any]:
    """Return the response of the same request without a stream."""
    *_, last = deltas
    completion = CompletionOutput(
        index=0,
        text="".join(delta.text for delta in deltas),
        token_ids=[1] * last.next_index,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
    output = RequestOutput(request_id="msg_ab", model="m", prompt=None, outputs=[completion], usage=last.usage)
    answer = (message or message_request()).answer(output)
    AnthropicMessage.model_validate(msgspec.to_builtins(answer))
    return msgspec.json.decode(msgspec.json.encode(answer))


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Put a message together from all its events as a client does it, and check their order."""
    start, *rest, end, stop = copy.deepcopy(events)
    assert (start["type"], end["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message, texts, is_open = start["message"], [], False
    for event in rest:
        if event["type"] == "content_block_start":
            assert (is_open, event["index"]) == (False, len(message["content"]))
            message["content"].append(event["content_block"])
            texts.append("")
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(texts) - 1
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(texts[-1] or "{}")
            continue
        delta = event["delta"]
        kind = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(delta["type"])
        if kind is None:
            texts[-1] += delta["partial_json"]
        else:
            block[kind] += delta[kind]
    assert not is_open
    return message | end["delta"] | {"usage": end["usage"]}


def pieces_by_number(events: NUMBERED) -> dict[int, Any]:
    """Return the content of each number: events, and each character of a delta."""
    at: dict[int, Any] = {}
    for number, event in events:
        delta = event.get("delta", {})
        text = delta.get("text") or delta.get("thinking") or delta.get("partial_json")
        for i, char in enumerate(reversed(text or "?")):
            assert number - i not in at
            at[number - i] = (event["index"], delta["type"], char) if text else event
    return at


def cut_at(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


cuts = st.lists(st.integers(0, 1000), max_size=8)


def test_the_events_of_an_answer_in_their_order() -> None:
    events = [event for _, event in events_after(deltas_from([TEXT]))]
    for event in events:
        EVENTS.validate_python(event)
    assert [event["type"].removeprefix("content_block_") for event in events] == [
        "message_start",
        "start",
        "delta",
        "delta",
        "stop",
        *["start", "delta", "stop"] * 3,
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert (start["id"], start["role"], start["content"], start["stop_reason"]) == ("msg_ab", "assistant", [], None)
    assert (start["usage"]["input_tokens"], start["usage"]["cache_read_input_tokens"]) == (4, 3)
    thinking, text, call, now = folded(events)["content"]
    assert (thinking["thinking"], text["text"]) == ("hm, a\nsum", "I look.")
    assert (call["name"], call["input"], now["name"], now["input"]) == ("weather", {"city": "Bonn"}, "now", {})
    assert len({call["id"], now["id"]}) == 2
    assert len(thinking["signature"]) == 64
    usage = events[-2]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (4, 3, len(TEXT))
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < len(TEXT)


@given(st.sampled_from([TEXT, "", "six.", CALL, "<think>hm", f"a {CALL} b", "<tool_call>no"]), cuts, cuts)
def test_any_cut_folds_into_the_whole_answer(text: str, places: list[int], others: list[int]) -> None:
    deltas = deltas_from(cut_at(text, places))
    events = events_after(deltas)
    assert folded([event for _, event in events]) == whole_answer(deltas)
    assert pieces_by_number(events) == pieces_by_number(events_after(deltas_from(cut_at(text, others)))), (
        "numbers depend on cuts"
    )


@given(cuts, cuts, st.data())
def test_a_second_reader_gets_exactly_the_rest(places: list[int], others: list[int], data: st.DataObject) -> None:
    events = events_after(deltas_from(cut_at(TEXT, places)))
    position = data.draw(st.integers(0, len(events)))
    after = events[position - 1][0] if position else 0
    rest = events_after(deltas_from(cut_at(TEXT, others)), after=after)
    assert pieces_by_number(rest) == pieces_by_number(events[position:])


@pytest.mark.parametrize(
    ("text", "reason", "stopped_at", "max_tokens", "stop_reason"),
    [
        ("six.", FinishReason.STOP, None, 100, "end_turn"),
        ("six.", FinishReason.STOP, "X", 100, "stop_sequence"),
        (CALL, FinishReason.STOP, None, 100, "tool_use"),
        ("six.", FinishReason.LENGTH, None, 4, "max_tokens"),
        ("six.", FinishReason.LENGTH, None, 100, "model_context_window_exceeded"),
        ("six.", FinishReason.LENGTH, None, None, "model_context_window_exceeded"),
        ("six.", FinishReason.EXPIRED, None, 100, "max_tokens"),
        ("six.", FinishReason.REPETITION, None, 100, "end_turn"),
        ("", FinishReason.STOP, None, 100, "end_turn"),
    ],
)
def test_stop_reasons(
    text: str, reason: FinishReason, stopped_at: str | None, max_tokens: int | None, stop_reason: str
) -> None:
    deltas = deltas_from([text], reason, stopped_at)
    message = folded([event for _, event in events_after(deltas, message_request(max_tokens=max_tokens))])
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, stopped_at)
    assert whole_answer(deltas, message_request(max_tokens=max_tokens)) == message
    if not text:
        assert message["content"] == [{"type": "text", "text": ""}]


def test_a_call_that_a_limit_cut_is_text_of_the_whole_answer() -> None:
    deltas = deltas_from([CALL[:-18]], FinishReason.LENGTH)
    message = whole_answer(deltas, message_request(max_tokens=len(CALL) - 18))
    (block,) = message["content"]
    assert (block["type"], message["stop_reason"]) == ("text", "max_tokens")
    assert block["text"].startswith("weather {")
    kinds = [event["type"] for _, event in events_after(deltas)]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_omitted_thinking_is_an_empty_block_with_a_signature() -> None:
    message = message_request(thinking={"type": "adaptive", "display": "omitted"})
    events = [event for _, event in events_after(deltas_from([TEXT]), message)]
    thinking = folded(events)["content"][0]
    assert (thinking["type"], thinking["thinking"], len(thinking["signature"])) == ("thinking", "", 64)
    assert whole_answer(deltas_from([TEXT]), message)["content"][0] == thinking


def test_an_engine_that_does_not_count_the_prompt_starts_the_message_anyway() -> None:
    first, *rest = deltas_from(list("six."))
    first.prompt_usage = None
    (_, start), *_, (_, end), _ = events_after([first, *rest])
    assert (start["message"]["usage"]["input_tokens"], end["usage"]["input_tokens"]) == (0, 4)


@pytest.mark.parametrize(("reason", "status"), [(FinishReason.CANCELLED, 499), (FinishReason.EXPIRED, 408)])
def test_a_request_without_an_answer_is_an_error(reason: FinishReason, status: int) -> None:
    with pytest.raises(OpenAIError) as caught:
        events_after([Delta(finish_reason=reason, usage=Usage(7, 0, 0))])
    assert caught.value.status == status
