"""The request that a body makes, and the field that an error names."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response as OpenAIResponse

from penstock.producer.openai.answers.common import new_id
from penstock.producer.openai.endpoints import RESPONSES, decode
from penstock.producer.openai.errors import OpenAIError
from penstock.producer.openai.responses.body import check_body
from penstock.producer.openai.responses.items import read_items
from penstock.producer.openai.responses.prepared import (
    PreparedResponse,
    new_response,
    prepare_response,
)
from penstock.producer.openai.responses.response_store import StoredResponse
from penstock.producer.results import CompletionOutput, RequestOutput
from penstock.shared.messages.outcome import FinishReason, Usage

from ..openai.generating import prepare as prepare_at

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}


def prepare(**fields: Any) -> PreparedResponse:
    body = decode(RESPONSES, {"model": "demo", "input": "hi"} | fields).body
    check_body(body)
    items = read_items(body.input, "resp_ab")
    return prepare_response(StoredResponse(id="resp_ab", created_at=1, model="demo", body=body, items=items))


def text(kind: str, content: str) -> dict[str, Any]:
    return {"type": kind, "text": content}


def messages(**fields: Any) -> list[Any]:
    prompt: Any = prepare(**fields).chat.prompt
    return list(prompt)


def test_a_cache_key_is_the_session_of_the_chat() -> None:
    assert prepare(prompt_cache_key="key").chat.options.get("session_id") == "key"


def test_text_is_a_message_of_the_user_behind_the_instructions() -> None:
    assert messages(instructions="be brief") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_items_become_the_messages_of_a_conversation() -> None:
    items = [
        {"role": "developer", "content": "in rhyme"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "weather"}, {"type": "input_text", "text": "now?"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look", "annotations": []}],
        },
        CALL,
        CALL | {"call_id": "c2"},
        RESULT,
        RESULT | {"call_id": "c2", "output": [text("input_text", "rain")]},
        {"role": "assistant", "content": "both"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no more"}]},
    ]
    system, user, turn, first, second, both, last = messages(instructions="be brief", input=items)
    assert system == {"role": "system", "content": "be brief\n\nin rhyme"}
    assert user == {"role": "user", "content": "weather\nnow?"}
    assert (turn["role"], turn["content"], turn["reasoning_content"]) == ("assistant", "I look", "hm")
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2"]
    assert (first["role"], first["tool_call_id"], first["content"]) == ("tool", "c1", "sunny")
    assert (second["tool_call_id"], second["content"]) == ("c2", "rain")
    assert (both["content"], last["content"]) == ("both", "no more")


def test_sampling_fields_reach_the_parameters() -> None:
    chat = prepare(
        max_output_tokens=5, temperature=0.5, top_p=0.9, top_k=3, seed=7, timeout_s=2.5, top_logprobs=2,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
    ).chat  # fmt: skip
    params = chat.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed) == (5, 0.5, 0.9, 3, 7)
    assert params.logprobs == chat.num_top_logprobs == 2
    assert chat.options.get("timeout_s") == 2.5
    assert prepare().chat.params.max_tokens is None


def test_logits_processors_are_chosen_as_in_a_chat() -> None:
    expected = {"logits_processors": {"ban": {"token_ids": [5]}}}
    record = prepare(vllm_xargs=expected, background=True).record
    # The gateway that continues with it reads the record.
    stored = msgspec.json.decode(msgspec.json.encode(record), type=StoredResponse)
    assert prepare_response(stored).chat.params.extra_args == expected
    assert prepare(vllm_xargs={}).chat.params.extra_args is None
    for wrong in ({"logits_processors": ["ban"]}, {"my_own": 1}, ["ban"]):
        with pytest.raises(OpenAIError) as caught:
            prepare(vllm_xargs=wrong)
        assert (caught.value.status, str(caught.value.param)[:10]) == (400, "vllm_xargs")


def test_earlier_items_are_returned() -> None:
    fields = {
        "instructions": "be brief",
        "metadata": {"k": "v"},
        "temperature": 0.0,
        "max_output_tokens": 9,
        "parallel_tool_calls": False,
        "tools": [WEATHER],
        "tool_choice": "auto",
        "reasoning": {"effort": "low"},
        "user": "u",
        "background": True,
    }
    response = msgspec.to_builtins(new_response(prepare(**fields).record))
    assert {name: response[name] for name in fields} == fields
    assert response["text"] == {"format": {"type": "text"}}
    assert (response["store"], response["top_p"], response["truncation"]) == (True, 1.0, "disabled")


def test_a_stored_record_is_unchanged() -> None:
    json_text = {"format": {"type": "json_object"}}
    record = prepare(tools=[WEATHER], tool_choice="none", text=json_text, input=[CALL, RESULT]).record
    stored = msgspec.json.decode(msgspec.json.encode(record), type=StoredResponse)
    assert stored == record
    assert prepare_response(stored).chat.params == prepare_response(record).chat.params


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": None}, "input", "must be given"),
        ({"input": []}, "input", "at least one item"),
        ({"input": 5}, "input", "expected"),
        ({"input": [5]}, "input[0]", "an object"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "'web_search_call'"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "robot"),
        ({"input": [{"role": "user"}]}, "input[0].content", "must be given"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio", "input_audio": "x"}]}]},
            "input[0].content[0].type",
            "supported types are input_text, input_image",
        ),
        (
            {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            "only messages of the role 'user'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            "input",
            "must have image_url",
        ),
        ({"input": [RESULT]}, "input", "no function_call with call_id 'c1'"),
        ({"temperature": 900}, "temperature", "[0, 100]"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"n": 2}, "n", "several requests"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"truncation": "auto"}, "truncation", "fewer items"),
        ({"background": True, "store": False}, "store", "background"),
        ({"webhook_url": "https://example.org"}, "webhook_url", "background=true"),
        ({"top_logprobs": 3}, "top_logprobs", "include"),
        ({"text": {"verbosity": "high"}}, "text.verbosity", "high"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "must be given"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "must be given"),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice", "mcp"),
        ({"metadata": {"k" * 65: "v"}}, "metadata", "64"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata", "16"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(OpenAIError) as caught:
        prepare(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert says in caught.value.message
    assert param in caught.value.message


def test_a_row_of_a_batch_stands_alone() -> None:
    body = {"model": "demo", "input": "hi", "max_output_tokens": 5, "metadata": {"k": "v"}}
    prepared = prepare_at(RESPONSES, json.dumps(body).encode())
    output = CompletionOutput(index=0, text="six", token_ids=[1, 2], finish_reason=FinishReason.LENGTH)
    whole = RequestOutput(request_id="b-1", model="demo", prompt=None, outputs=[output], usage=Usage(3, 2, 1))
    response_id = new_id(prepared.id_prefix)
    response = OpenAIResponse.model_validate_json(
        msgspec.json.encode(prepared.answer(whole, response_id=response_id)), strict=True
    )
    assert (response.id, response.model, response.status) == (response_id, "demo", "incomplete")
    assert (response.output_text, response.metadata) == ("six", {"k": "v"})
    assert prepared.params.max_tokens == 5
    for name, value in (("previous_response_id", "resp_x"), ("background", True), ("stream", True)):
        with pytest.raises(OpenAIError) as caught:
            prepare_at(RESPONSES, body | {name: value})
        assert caught.value.param == name
