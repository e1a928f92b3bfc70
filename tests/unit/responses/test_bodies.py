"""The request that a body makes, and the field that an error names."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response as OpenAIResponse

from penstock.producer.openai.answers.common import new_id
from penstock.producer.openai.endpoints import RESPONSES
from penstock.producer.openai.errors import OpenAIError
from penstock.producer.openai.parsers import Parsers
from penstock.producer.openai.responses.prepared import (
    PreparedResponse,
    new_response,
    prepare_response,
)
from penstock.producer.openai.responses.response_store import StoredResponse
from penstock.producer.results import CompletionOutput, RequestOutput
from penstock.shared.messages.outcome import FinishReason, Usage

from ..openai.generating import prepare as prepare_at
from ..openai.generating import prepare_to_store, template_kwargs

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}


def prepare(**fields: Any) -> PreparedResponse:
    return prepare_to_store({"model": "demo", "input": "hi"} | fields)


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
        ({"input": [{"type": "no_such_item"}]}, "input[0].type", "'no_such_item'"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id", "'msg_1' is unknown"),
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
        ({"input": [RESULT]}, "input", "no call with call_id 'c1'"),
        ({"temperature": 900}, "temperature", "[0, 100]"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"n": 2}, "n", "several requests"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"truncation": "middle"}, "truncation", "'auto'"),
        ({"background": True, "store": False}, "store", "background"),
        ({"webhook_url": "https://example.org"}, "webhook_url", "background=true"),
        ({"top_logprobs": 3}, "top_logprobs", "include"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "loud"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "huge"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "must be given"),
        ({"tools": [{"type": "apply_patch"}]}, "tools[0].type", "offer the tool as a function"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
        ({"tools": ["web_search"]}, "tools[0]", "an object"),
        ({"tools": [{"type": "custom", "name": "p", "format": {"type": "xml"}}]}, "tools[0].format.type", "'grammar'"),
        (
            {"tools": [{"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "ebnf"}}]},
            "tools[0].format.syntax",
            "'lark'",
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
            "tools[0].tools[0].name",
            "",
        ),
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


def test_a_row_whose_prompt_begins_the_reasoning_has_a_reasoning_item() -> None:
    prepared = prepare_at(RESPONSES, {"model": "demo", "input": "hi"}, Parsers(reasoning="qwen3"))
    output = CompletionOutput(
        index=0, text="hm</think>six", token_ids=[1], finish_reason=FinishReason.STOP, begins_in_reasoning=True
    )
    whole = RequestOutput(request_id="b-1", model="demo", prompt=None, outputs=[output], usage=Usage(3, 1, 0))
    response = prepared.answer(whole, response_id=new_id(prepared.id_prefix))
    reasoning, message = msgspec.to_builtins(response)["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "hm")
    assert (message["type"], message["content"][0]["text"]) == ("message", "six")


def names_of(**fields: Any) -> list[str]:
    return [tool["function"]["name"] for tool in template_kwargs(prepare(**fields).chat.options)["tools"]]


def test_only_tools_that_the_caller_runs_are_offered() -> None:
    server_tools = [{"type": kind} for kind in ("web_search", "mcp", "image_generation", "computer_use_preview")]
    searches = [{"type": "tool_search", "execution": execution} for execution in ("client", "server")]
    namespace = {"type": "namespace", "name": "n", "tools": [WEATHER, {"type": "custom", "name": "c"}]}
    assert names_of(tools=[WEATHER, *server_tools, *searches, namespace]) == [
        "weather",
        "tool_search",
        "n__weather",
        "n__c",
    ]
    assert prepare(tools=server_tools, tool_choice="auto").record.body.ignored == [
        f"tools.{tool['type']}" for tool in server_tools
    ]


def test_a_choice_names_a_tool_of_any_kind() -> None:
    tools = [
        WEATHER,
        {"type": "custom", "name": "patch"},
        {"type": "tool_search", "execution": "client"},
        {"type": "namespace", "name": "n", "tools": [WEATHER]},
    ]
    allowed = {"type": "allowed_tools", "mode": "auto"}
    for entries, names in [
        ([{"type": "custom", "name": "patch"}, {"type": "web_search"}], ["patch"]),
        ([{"type": "function", "name": "weather", "namespace": "n"}], ["n__weather"]),
        ([{"type": "tool_search"}], ["tool_search"]),
    ]:
        assert names_of(tools=tools, tool_choice={**allowed, "tools": entries}) == names
    forced = prepare(tools=tools, tool_choice={"type": "tool_search"}).chat
    assert forced.form.is_single is False
    assert forced.params.structured_outputs is not None


def test_a_long_name_within_a_namespace_ends_in_its_digest() -> None:
    tools = [{"type": "namespace", "name": "n" * 90, "tools": [WEATHER | {"name": x * 90} for x in "ab"]}]
    first, second = names_of(tools=tools)
    assert len(first) == len(second) == 128
    assert first != second


def test_images_of_outputs_follow_them_as_a_message_of_the_user() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "high"}
    custom = {"type": "custom_tool_call", "call_id": "c2", "name": "draw", "input": "a"}
    outputs = [
        RESULT | {"output": [text("input_text", "seen"), image]},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [image]},
    ]
    rest = messages(input=[{"role": "user", "content": "look"}, CALL, custom, *outputs])[2:]
    assert [message["role"] for message in rest] == ["tool", "tool", "user"]
    assert [message["content"] for message in rest[:2]] == ["seen", "The image is in the next message."]
    assert [part["type"] for part in rest[2]["content"]] == ["image_url", "image_url"]


def test_found_tools_may_be_called() -> None:
    items = [
        {"type": "tool_search_call", "call_id": "s", "execution": "client", "arguments": {"query": "w"}},
        {"type": "tool_search_output", "call_id": "s", "execution": "client", "tools": [WEATHER]},
    ]
    fields = {"tools": [{"type": "tool_search", "execution": "client"}], "input": items}
    assert names_of(**fields) == ["tool_search", "weather"]
    call, output = messages(**fields)
    assert call["tool_calls"][0]["function"] == {"name": "tool_search", "arguments": '{"query": "w"}'}
    assert json.loads(output["content"]) == [WEATHER]


def test_items_of_tools_that_run_elsewhere_are_ignored() -> None:
    items = [{"role": "user", "content": "hi"}, {"type": "web_search_call", "id": "ws_1", "status": "completed"}]
    prepared = prepare(input=[*items, {"type": "compaction", "encrypted_content": "x"}])
    assert len(prepared.record.items) == 1
    assert prepared.record.body.ignored == ["input.web_search_call", "input.compaction"]


def test_all_kinds_of_items_are_stored() -> None:
    items: list[Any] = [
        {"type": "custom_tool_call", "call_id": "p", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "p", "output": "done"},
        CALL | {"namespace": "n"},
        RESULT,
        {"type": "tool_search_call", "call_id": "s", "arguments": {}},
        {"type": "tool_search_output", "call_id": "s", "tools": [WEATHER]},
    ]
    record = prepare(input=items, tools=[WEATHER, {"type": "web_search"}], text={"verbosity": "low"}).record
    assert msgspec.json.decode(msgspec.json.encode(record), type=StoredResponse) == record
    assert template_kwargs(prepare_response(record).chat.options)["verbosity"] == "low"
