"""The request that a body of the Messages API makes, and the fields that errors name."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params

from penstock.producer.anthropic.body import MessagesBody
from penstock.producer.anthropic.errors import MESSAGES, error_body
from penstock.producer.anthropic.prepared import PreparedMessage
from penstock.producer.openai.endpoints import decode
from penstock.producer.openai.errors import OpenAIError, error_of
from penstock.producer.openai.parsers import Parsers
from penstock.shared.errors import PromptTooLongError, QueueFullError
from penstock.shared.params.structured import StructuredOutputsParams

from ..openai.generating import template_kwargs

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Reports.", "input_schema": CITY}
FUNCTION = {"type": "function", "function": {"name": "weather", "description": "Reports.", "parameters": CITY}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
THINKS = Parsers("hermes", "qwen3", thinks_before_grammar=True)


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content[0] if isinstance(content[0], str) else list(content)}


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c1", "content": content, **fields}


def prepared_message(*messages: Any, parsers: Parsers | None = None, **fields: Any) -> PreparedMessage:
    body = {"model": "m", "max_tokens": 5, "messages": list(messages) or [user("hi")], **fields}
    prepared = decode(MESSAGES, json.dumps(body).encode()).prepare(parsers or Parsers())
    assert isinstance(prepared, PreparedMessage)
    return prepared


def chat_of(*messages: Any, **fields: Any) -> list[Any]:
    """Return the chat messages of a conversation."""
    prompt: Any = prepared_message(*messages, **fields).prompts[0]
    return list(prompt)


# Fields of the reference without a meaning here. Each is named in the response.
IGNORED = {
    "billing_policy": {"type": "x"},
    "container": "c1",
    "context_management": {"edits": []},
    "diagnostics": {},
    "fallback_credit_token": "t",
    "fallbacks": "default",
    "inference_geo": "eu",
    "mcp_servers": [{"name": "m", "type": "url", "url": "https://example.org"}],
    "speed": "fast",
}
REFUSED = {"thread": {"type": "create"}, "compaction": {"type": "summarize"}}
# Headers, which the package lists among the fields.
HEADERS = {"betas", "user_profile_id", "workspace_id"}


@pytest.mark.parametrize("reference", [message_create_params, beta_message_create_params])
def test_every_field_of_the_reference_is_accepted_named_or_refused(reference: Any) -> None:
    fields = set(get_type_hints(reference.MessageCreateParamsNonStreaming)) - HEADERS
    assert {"messages", "thinking"} < fields
    assert fields - set(MessagesBody.__struct_fields__) <= IGNORED.keys() | REFUSED.keys()
    assert not (IGNORED.keys() | REFUSED.keys()) & set(MessagesBody.__struct_fields__)


def test_fields_without_a_meaning_are_named_or_refused() -> None:
    body = {"model": "m", "max_tokens": 5, "messages": [user("hi")]}
    assert set(decode(MESSAGES, body | IGNORED).ignored) == IGNORED.keys()
    for name, value in REFUSED.items():
        with pytest.raises(OpenAIError, match=f"{name} is not supported; leave it out") as caught:
            decode(MESSAGES, body | {name: value})
        assert (caught.value.status, caught.value.param) == (400, name)
        assert decode(MESSAGES, body | {name: None}).ignored == ()
    served: dict[str, Any] = {"service_tier": "auto", "metadata": {"user_id": "u"}, "cache_control": {"type": "x"}}
    assert decode(MESSAGES, body | served).ignored == ()


def test_blocks_without_a_meaning_are_named() -> None:
    dropped = [{"type": "redacted_thinking", "data": "x"}, {"type": "compaction", "content": None}]
    inner = result([text("9"), {"type": "container_upload", "file_id": "f"}])
    messages = [user("hi"), assistant(*dropped, CALL), user(inner, {"type": "made_up"})]
    decoded = decode(MESSAGES, {"model": "m", "max_tokens": 5, "messages": messages})
    kinds = ["redacted_thinking", "compaction", "made_up", "container_upload"]
    assert decoded.ignored == tuple(f"messages.{kind}" for kind in kinds)


def test_the_former_place_of_the_format_of_the_output() -> None:
    form = {"type": "json_schema", "schema": CITY}
    former = prepared_message(output_format=form, output_config={"effort": "low"})
    assert former.params == prepared_message(output_config={"format": form, "effort": "low"}).params
    assert former.params.structured_outputs is not None


CALL = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Bonn"}, "caller": {"type": "direct"}}
CHAT_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city":"Bonn"}'},
}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hi", "hi"),
        ([text("hi", cache_control={"type": "ephemeral"}, citations=None)], "hi"),
        ([text("a"), text("b")], [text("a"), text("b")]),
        ([text("see"), IMAGE], [text("see"), PICTURE]),
        (
            [{"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}],
            [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}],
        ),
        (
            [{"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}],
            [text("T"), text("d")],
        ),
        (
            [{"type": "document", "source": {"type": "content", "content": [text("a"), IMAGE]}}],
            [text("a"), PICTURE],
        ),
        ([{"type": "document", "source": {"type": "content", "content": "a"}}], "a"),
        (
            [{"type": "search_result", "source": "https://x", "title": "T", "content": [text("a")]}],
            [text("T"), text("https://x"), text("a")],
        ),
        ([text("a"), {"type": "container_upload", "file_id": "f"}, {"type": "new_kind", "content": {"a": 1}}], "a"),
    ],
)
def test_blocks_of_the_user_become_parts(content: Any, expected: Any) -> None:
    assert chat_of({"role": "user", "content": content}) == [{"role": "user", "content": expected}]


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("be", "be"),
        ([text("a", cache_control={"type": "ephemeral"}), text("b")], "a\n\nb"),
        ([text("x-anthropic-billing-header: cc_version=2; cch=f00;"), text("b")], "b"),
        (
            "x-anthropic-billing-header: cch=1\nbe x-anthropic-billing-header: kept",
            "be x-anthropic-billing-header: kept",
        ),
    ],
)
def test_the_system_prompt_is_one_message_without_the_billing_text(system: Any, expected: str) -> None:
    assert chat_of(system=system)[0] == {"role": "system", "content": expected}


def test_billing_text_elsewhere_stays() -> None:
    assert chat_of(user("x-anthropic-billing-header: a"))[0]["content"] == "x-anthropic-billing-header: a"
    assert [m["role"] for m in chat_of(system=[text("x-anthropic-billing-header: cch=1")])] == ["user"]


def test_a_turn_with_tools_keeps_its_order() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": ""}
    messages = chat_of(
        user("hot?"),
        {"role": "system", "content": [text("be brief", cache_control={"type": "ephemeral"})]},
        assistant(thinking, {"type": "redacted_thinking", "data": "x"}, text("I look."), CALL),
        user(text("and now?"), result([text("warm"), IMAGE, {"type": "tool_reference", "tool_name": "now"}])),
        tools=[WEATHER],
    )
    assert messages == [
        {"role": "user", "content": "hot?"},
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": "I look.", "tool_calls": [CHAT_CALL], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "warm\nnow"},
        {"role": "user", "content": [PICTURE, text("and now?")]},
    ]


@pytest.mark.parametrize("content", [None, "", [], [{"type": "web_search_tool_result", "content": {"a": 1}}]])
def test_a_result_may_be_empty_and_an_error(content: Any) -> None:
    *_, last = chat_of(user("a"), assistant(CALL), user(result(content, is_error=True)))
    assert last == {"role": "tool", "tool_call_id": "c1", "content": ""}


def test_consecutive_messages_of_one_role_are_one() -> None:
    messages = chat_of(user("a"), user("b"), assistant("c"), assistant(CALL), user(result("d")), user("e"), user(IMAGE))
    assert messages == [
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "assistant", "content": "c", "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "d"},
        {"role": "user", "content": [text("e"), PICTURE]},
    ]


def test_fields_reach_the_parameters_and_options() -> None:
    prepared = prepared_message(
        temperature=0.5,
        top_p=0.5,
        top_k=7,
        stop_sequences=["\n\nHuman:"],
        stream=True,
        metadata={"user_id": "u"},
        cache_control={"type": "ephemeral"},
        service_tier="auto",
        band="batch",
        timeout_s=2.5,
        session_id="s",
        priority=3,
        cache_salt="x",
        chat_template_kwargs={"a": 1},
    )
    params = prepared.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.5, 7, 5)
    assert (params.stop, prepared.stream, prepared.id_prefix) == (["\n\nHuman:"], True, "msg_")
    assert prepared.options == {
        "model": "m",
        "band": "batch",
        "timeout_s": 2.5,
        "session_id": "s",
        "priority": 3,
        "cache_salt": "x",
        "chat_template_kwargs": {"a": 1},
    }


@pytest.mark.parametrize(
    ("fields", "kwargs", "budget"),
    [
        ({"thinking": {"type": "adaptive"}}, {}, None),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}, None),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}},
            {"enable_thinking": True, "thinking": True},
            1024,
        ),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "max"}, None),
    ],
)
def test_thinking_reaches_the_template(fields: Any, kwargs: Any, budget: int | None) -> None:
    prepared = prepared_message(parsers=THINKS, **fields)
    assert prepared.options.get("chat_template_kwargs", {}) == kwargs
    assert prepared.params.thinking_token_budget == budget
    assert prepared.shows_thinking == ("omitted" not in str(fields))


def test_the_format_of_the_output_is_a_grammar() -> None:
    prepared = prepared_message(output_config={"format": {"type": "json_schema", "schema": CITY}})
    assert isinstance(prepared.params.structured_outputs, StructuredOutputsParams)
    assert prepared.params.structured_outputs.json == CITY


@pytest.mark.parametrize(
    ("choice", "forced", "functions"),
    [
        (None, None, [FUNCTION]),
        ({"type": "auto"}, None, [FUNCTION]),
        ({"type": "none"}, None, None),
        ({"type": "tool", "name": "weather"}, CITY, [FUNCTION]),
    ],
)
def test_tools_are_functions(choice: Any, forced: Any, functions: Any) -> None:
    tool = {**WEATHER, "type": "custom", "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}
    prepared = prepared_message(tools=[tool], tool_choice=choice)
    assert (prepared.options.get("chat_template_kwargs") or {}).get("tools") == functions
    grammar = prepared.params.structured_outputs
    assert (grammar.json if isinstance(grammar, StructuredOutputsParams) else None) == forced


def test_any_tool_is_a_list_of_calls_and_one_at_most_without_parallel_use() -> None:
    prepared = prepared_message(tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    grammar = prepared.params.structured_outputs
    assert isinstance(grammar, StructuredOutputsParams)
    assert isinstance(grammar.json, dict)
    assert (grammar.json["type"], grammar.json["maxItems"]) == ("array", 1)


def test_tools_of_the_server_are_dropped_and_named() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    body = {"model": "m", "messages": [user("hi")], "tools": [search, WEATHER], "context_management": {"edits": []}}
    decoded = decode(MESSAGES, body)
    assert decoded.ignored == ("context_management", "tools.web_search")
    prepared = decoded.prepare(Parsers())
    assert prepared.options.get("chat_template_kwargs") == {"tools": [FUNCTION]}


def test_deferred_tools_are_offered_once_the_conversation_refers_to_them() -> None:
    def offered(*messages: Any) -> list[str]:
        deferred = [{**WEATHER, "name": name, "defer_loading": True} for name in ("a", "b")]
        prepared = prepared_message(*messages, tools=[WEATHER, *deferred])
        return [tool["function"]["name"] for tool in template_kwargs(prepared.options)["tools"]]

    search_result = user(result([{"type": "tool_reference", "tool_name": "a"}]))
    added = {"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "b"}}]}
    removed = {
        "role": "system",
        "content": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "weather"}}],
    }
    assert offered(user("hi")) == ["weather"]
    assert offered(user("hi"), assistant(CALL), search_result) == ["weather", "a"]
    assert offered(user("hi"), added, removed) == ["b"]


@pytest.mark.parametrize(
    ("messages", "fields", "message"),
    [
        ([], {"messages": []}, "messages must hold at least one message"),
        ([{"role": "system", "content": []}], {"system": []}, "messages must hold a message that is not empty"),
        ([user("a"), assistant("b")], {}, "messages must not end with a message of the assistant: its answer cannot"),
        ([{"role": "tool", "content": ""}], {}, "messages[0].role: invalid enum value 'tool'"),
        (
            [user({"type": "image", "source": {"type": "file", "file_id": "f"}})],
            {},
            "messages[0].content[0].source.type of an image must be 'base64' or 'url', got 'file'",
        ),
        (
            [user({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}})],
            {},
            "messages[0].content[0].source.type of a document must be 'text' or 'content', got 'base64': files such as "
            "PDF",
        ),
        ([user("a"), assistant({**CALL, "input": "x"}), user("b")], {}, "messages[1].content[0].input must be an obje"),
        (
            [user("a"), assistant({**CALL, "id": ""}), user("b")],
            {"system": "be"},
            "messages[1].tool_calls[0].id must be a non-empty string",
        ),
        ([], {"n": 2}, "n must be 1 here, got 2"),
        ([], {"temperature": 3000}, "temperature must be"),
        ([], {"max_tokens": -1}, "max_tokens must be"),
        ([], {"stop_sequences": [""]}, "stop_sequences"),
        ([], {"output_config": {"effort": "huge"}}, "output_config.effort: invalid enum value 'huge'"),
        ([], {"output_config": {"format": {"type": "grammar"}}}, "output_config.format must have the type 'json_schem"),
        (
            [],
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "text"}}}},
            "output_config.format.schema.type must be one or more of",
        ),
        (
            [],
            {"tools": [{"type": "web_search_20250305", "name": "s"}, {**WEATHER, "name": "a b"}]},
            "tools[1].name must be 1 to 128 of",
        ),
        ([], {"tools": [{**WEATHER, "input_schema": {"type": "list"}}]}, "tools[0].input_schema.type must be"),
        ([], {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type 'bash_20250124' is not supported"),
        (
            [],
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "now"}},
            "tool_choice.name must be one of the tools (weather), got 'now'",
        ),
        ([], {"tool_choice": {"type": "function"}}, "tool_choice.type must be 'auto', 'any', 'none' or 'tool'"),
        ([], {"tool_choice": {"type": "any"}}, "tool_choice is 'required', but tools is empty"),
    ],
)
def test_errors_name_the_field_of_the_body(messages: list[Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OpenAIError) as caught:
        prepared_message(*messages, **fields)
    assert caught.value.status == 400
    assert caught.value.message.startswith(message)
    assert caught.value.param is not None


def test_a_tool_may_have_a_name_of_128_characters() -> None:
    assert template_kwargs(prepared_message(tools=[{**WEATHER, "name": "n" * 128}]).options)["tools"]
    with pytest.raises(OpenAIError, match=r"^tools\[0\]\.name must be 1 to 128"):
        prepared_message(tools=[{**WEATHER, "name": "n" * 129}])


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            PromptTooLongError("prompt has 90 tokens, but max_model_len is 64, and at least one output token must fit"),
            "invalid_request_error",
            "prompt is too long: 90 tokens > 64 maximum",
        ),
        (
            PromptTooLongError("prompt has at least 90 tokens, but max_model_len of 'm-7' is 64, and at least one"),
            "invalid_request_error",
            "prompt is too long: 90 tokens > 64 maximum",
        ),
        (QueueFullError("the queue is full", retry_after_s=3), "rate_limit_error", "the queue is full"),
        (OpenAIError(401, "no key"), "authentication_error", "no key"),
        (OpenAIError(499, "cancelled"), "invalid_request_error", "cancelled"),
        (OpenAIError(503, "no engine"), "overloaded_error", "no engine"),
        (ZeroDivisionError(), "api_error", "the server failed; see its log"),
    ],
)
def test_errors_have_the_form_of_the_path(error: BaseException, kind: str, message: str) -> None:
    api_error = error_of(error)
    for path in (MESSAGES, f"{MESSAGES}/count_tokens", f"{MESSAGES}/batches"):
        body: Any = error_body(path, api_error, "req_1")
        assert (body.type, body.error.type, body.error.message, body.request_id) == ("error", kind, message, "req_1")
    assert error_body("/v1/chat/completions", api_error, "req_1") == api_error.body
