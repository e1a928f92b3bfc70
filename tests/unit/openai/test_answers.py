"""Responses and chunks made of outputs and deltas."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from penstock.producer.openai.answers.common import created_at, new_id
from penstock.producer.openai.errors import OpenAIError
from penstock.producer.results import RequestOutput, final_output
from penstock.producer.sse import COMMENT
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, TokenLogprobs, Usage

from .generating import prepare

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def plain(struct: msgspec.Struct | None) -> Any:
    return json.loads(msgspec.json.encode(struct))


def output(*wholes: Delta, request_id: str = "chatcmpl-1") -> RequestOutput:
    return final_output(request_id, "m", "hi", wholes)


def ended(text: str, reason: FinishReason = FinishReason.STOP, **fields: Any) -> Delta:
    return Delta(token_ids=[1, 2], text=text, finish_reason=reason, usage=Usage(5, 2, 4), **fields)


def test_an_id_contains_its_creation_time() -> None:
    response_id = new_id("chatcmpl")
    assert len(response_id) == len("chatcmpl-") + 32
    assert created_at(response_id) == int(response_id[9:17], 16)


def test_a_chat_completion_has_all_that_the_sdk_reads() -> None:
    euro = TokenLogprobs(7, -0.5, 2, [(3, -0.25), (7, -0.5)], ["€".encode()[:2], b"a", "€".encode()[:2]])
    prepared = prepare(CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1})
    answer = plain(prepared.answer(output(ended("four", logprobs=[euro, TokenLogprobs(8, -1e9, 1, [])]))))
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "four", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "stop", None)
    first, second = choice["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("\ufffd", [0xE2, 0x82], -0.5)
    assert first["top_logprobs"] == [{"token": "a", "logprob": -0.25, "bytes": [97]}]
    assert (second["token"], second["bytes"], second["logprob"]) == ("token_id:8", None, -9999.0)
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert (answer["object"], answer["model"], answer["id"]) == ("chat.completion", "m", "chatcmpl-1")


def test_a_chat_stream_has_a_chunk_for_a_delta_and_the_usage_at_the_end() -> None:
    body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, "n": 2}
    chunks = prepare(CHAT, body).events("chatcmpl-1", "m")
    deltas = [
        Delta(token_ids=[1], text="", child=1),
        Delta(token_ids=[1], text="a", child=0),
        Delta(index=1, token_ids=[2], text="", child=0),
        Delta(index=2, text="b", finish_reason=FinishReason.LENGTH, usage=Usage(5, 2, 4), child=0),
        Delta(index=1, finish_reason=FinishReason.STOP, stop_reason="x", usage=Usage(5, 1, 4), child=1),
    ]
    choices = [plain(chunk)["choices"][0] for delta in deltas if (chunk := chunks.feed(delta)) is not None]
    assert choices == [
        {"index": 1, "delta": {"role": "assistant", "content": ""}, "finish_reason": None},
        {"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": None},
        {"index": 0, "delta": {"content": "b"}, "finish_reason": "length", "stop_reason": None},
        {"index": 1, "delta": {}, "finish_reason": "stop", "stop_reason": "x"},
    ]
    end = plain(chunks.end())
    assert (end["choices"], end["usage"]["prompt_tokens"], end["usage"]["completion_tokens"]) == ([], 5, 3)
    assert prepare(CHAT, {"messages": MESSAGES, "stream": True}).events("x-1", "m").end() is None


def test_completions_count_choices_over_prompts() -> None:
    prepared = prepare(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "echo": False})
    outputs = [output(ended(text + "0"), ended(text + "1"), request_id="cmpl-1") for text in "ab"]
    answer = plain(prepared.answer(*outputs))
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert answer["usage"]["prompt_tokens"] == 10
    assert answer["usage"]["completion_tokens"] == 8


def prompt_tokens() -> dict[str, Any]:
    return {
        "first_prompt_token": (4, b"he"),
        "prompt_logprobs": [TokenLogprobs(5, -1.0, 3, [(9, -0.5)], [b"llo", b"y"])],
    }


def test_echo_returns_the_prompt_and_its_log_probabilities() -> None:
    prepared = prepare(COMPLETIONS, {"prompt": "hello", "echo": True, "logprobs": 1})
    tokens = [TokenLogprobs(6, -0.1, 1, [(6, -0.1)], [b" you", b" you"])]
    (choice,) = plain(prepared.answer(output(ended(" you", logprobs=tokens, **prompt_tokens()))))["choices"]
    assert choice["text"] == "hello you"
    assert choice["logprobs"] == {
        "tokens": ["he", "llo", " you"],
        "token_logprobs": [None, -1.0, -0.1],
        "top_logprobs": [None, {"y": -0.5, "llo": -1.0}, {" you": -0.1}],
        "text_offset": [0, 2, 5],
    }


def test_echo_of_token_ids_without_new_tokens() -> None:
    prepared = prepare(COMPLETIONS, {"prompt": [4, 5], "echo": True, "max_tokens": 0})
    answer = plain(prepared.answer(output(ended(" you", **prompt_tokens()))))
    assert answer["choices"][0]["text"] == "hello"
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)


def test_a_streamed_echo_sends_the_prompt_once() -> None:
    chunks = prepare(COMPLETIONS, {"prompt": "hello", "echo": True, "logprobs": 0, "stream": True}).events("c", "m")
    first = Delta(token_ids=[6], text=" y", logprobs=[TokenLogprobs(6, -0.5, 1, [], [b" y"])], **prompt_tokens())
    second = Delta(index=1, token_ids=[7], text="ou", logprobs=[TokenLogprobs(7, -0.5, 1, [], [b"ou"])])
    choices = [plain(chunks.feed(delta))["choices"][0] for delta in (first, second)]
    assert [choice["text"] for choice in choices] == ["hello y", "ou"]
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[0, 2, 5], [7]]


def test_the_openai_package_reads_comments_between_events() -> None:
    """Its reader takes an empty line for an event once an id has come."""
    chunks = prepare(CHAT, {"messages": MESSAGES, "stream": True}).events("chatcmpl-1", "m")
    deltas = [Delta(token_ids=[1], text="a"), Delta(index=1, token_ids=[2], text="b")]
    events = [b"id: %d\ndata: %b\n\n" % (i, msgspec.json.encode(chunks.feed(delta))) for i, delta in enumerate(deltas)]
    content = COMMENT.join([b"", *events, b"data: [DONE]\n\n"])
    with openai.OpenAI(base_url="http://localhost", api_key="none") as sdk:
        response: Any = httpx.Response(200, content=content, request=httpx.Request("POST", "http://localhost"))
        stream = openai.Stream(cast_to=ChatCompletionChunk, response=response, client=sdk)
        assert [chunk.choices[0].delta.content for chunk in stream] == ["a", "b"]


def test_offsets_count_the_characters_of_the_text() -> None:
    """Neither a special token, nor an added space, nor the bytes of an emoji are characters of their own."""
    emoji = [bytes([byte]) for byte in "😀".encode()]
    own = {
        "first_prompt_token": (1, b"<s>"),
        "prompt_logprobs": [TokenLogprobs(i, -1.0, 1, [], [data]) for i, data in enumerate([b" hi", *emoji, b"!"])],
    }
    outputs = [TokenLogprobs(i, -1.0, 1, [], [data]) for i, data in enumerate([*emoji, b"x", b"</s>"])]
    delta = Delta(token_ids=list(range(6)), text="😀x", text_ends=[0, 0, 0, 1, 2], logprobs=outputs, **own)
    delta.finish_reason = FinishReason.STOP
    body = {"prompt": "hi😀!", "echo": True, "logprobs": 0}
    (whole,) = plain(prepare(COMPLETIONS, body).answer(output(delta)))["choices"]
    assert whole["logprobs"]["text_offset"] == [0, 0, 2, 2, 2, 2, 3, 4, 4, 4, 4, 5, 6]
    assert whole["text"][4:] == "😀x"
    chunks = prepare(COMPLETIONS, body | {"stream": True}).events("c", "m")
    parts = [Delta(token_ids=[0], text="", logprobs=outputs[:1], **own)]
    parts += [Delta(index=i, token_ids=[i], text="", logprobs=[outputs[i]]) for i in (1, 2)]
    parts += [Delta(index=3, token_ids=[3, 4], text=delta.text, text_ends=[1], logprobs=outputs[3:5])]
    choices = [plain(chunks.feed(part))["choices"][0] for part in parts]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"][:-1]


@pytest.mark.parametrize(("reason", "status"), [(FinishReason.CANCELLED, 499), (FinishReason.EXPIRED, 408)])
def test_an_end_without_an_answer_is_an_error(reason: FinishReason, status: int) -> None:
    prepared = prepare(CHAT, {"messages": MESSAGES})
    nothing = Delta(finish_reason=reason)
    for tell in (lambda: prepared.answer(output(nothing)), lambda: prepared.events("x-1", "m").feed(nothing)):
        with pytest.raises(OpenAIError) as caught:
            tell()
        assert caught.value.status == status


def test_ends_that_openai_has_no_word_for_are_in_stop_reason() -> None:
    prepared = prepare(CHAT, {"messages": MESSAGES})
    ends = {}
    for reason in (FinishReason.REPETITION, FinishReason.EXPIRED):
        (choice,) = plain(prepared.answer(output(ended("x", reason))))["choices"]
        ends[reason.value] = (choice["finish_reason"], choice["stop_reason"])
    assert ends == {"repetition": ("stop", "repetition"), "expired": ("length", "expired")}
