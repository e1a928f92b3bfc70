"""A field that asks for nothing counts as missing, for each body, whether we know it or not."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import msgspec
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from penstock.producer.openai.endpoints import decode
from penstock.producer.openai.errors import OpenAIError
from penstock.producer.openai.parsers import Parsers
from penstock.producer.openai.unknown_fields import counted_name, header_value

from .generating import prepare

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
}
REFERENCE: dict[str, Any] = {
    CHAT: chat_create_params.CompletionCreateParamsNonStreaming,
    COMPLETIONS: completion_create_params.CompletionCreateParamsNonStreaming,
    RESPONSES: response_create_params.ResponseCreateParamsNonStreaming,
}
# The reference's default, or an equivalent.
OF_ALL: list[tuple[str, Any]] = [
    ("temperature", 1),
    ("top_p", 1),
    ("stream", False),
    ("stream_options", {}),
    ("stream_options", {"include_obfuscation": False}),
    ("service_tier", "auto"),
    ("store", False),
    ("metadata", {}),
]
DEFAULTS: dict[str, list[tuple[str, Any]]] = {
    CHAT: [
        *OF_ALL,
        ("frequency_penalty", 0),
        ("presence_penalty", 0),
        ("function_call", "auto"),
        ("function_call", "none"),
        ("functions", []),
        ("logit_bias", {}),
        ("logprobs", False),
        ("top_logprobs", 0),
        ("modalities", ["text"]),
        ("n", 1),
        ("parallel_tool_calls", True),
        ("response_format", {"type": "text"}),
        ("tool_choice", "none"),
        ("tool_choice", "auto"),
        ("tools", []),
        ("verbosity", "medium"),
        ("stream_options", {"include_usage": False}),
        ("echo", False),
        ("best_of", 1),
        ("documents", []),
        ("length_penalty", 1.0),
        ("use_beam_search", False),
        ("return_token_ids", False),
    ],
    COMPLETIONS: [
        *OF_ALL,
        ("best_of", 1),
        ("echo", False),
        ("frequency_penalty", 0),
        ("presence_penalty", 0),
        ("logit_bias", {}),
        ("max_tokens", 16),
        ("n", 1),
        ("suffix", ""),
        ("response_format", {"type": "text"}),
        ("use_beam_search", False),
    ],
    RESPONSES: [
        *OF_ALL,
        ("background", False),
        ("context_management", []),
        ("include", []),
        ("parallel_tool_calls", True),
        ("reasoning", {}),
        ("text", {}),
        ("text", {"format": {"type": "text"}, "verbosity": "medium"}),
        ("tool_choice", "auto"),
        ("tools", []),
        ("top_logprobs", 0),
        ("truncation", "disabled"),
        ("n", 1),
        ("enable_response_messages", False),
    ],
}


def asked(path: str, **fields: Any) -> Any:
    prepared = prepare(path, json.dumps(NEEDED[path] | fields).encode())
    return prepared.prompts, prepared.params, prepared.options, prepared.stream


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path, form in REFERENCE.items() for name in get_type_hints(form) if name not in NEEDED[path]],
)
def test_null_is_the_default_of_every_field_of_the_reference(path: str, name: str) -> None:
    assert asked(path, **{name: None}) == asked(path)


@pytest.mark.parametrize(("path", "name", "value"), [(path, *one) for path, all_ in DEFAULTS.items() for one in all_])
def test_a_default_that_is_sent_asks_for_nothing(path: str, name: str, value: Any) -> None:
    assert asked(path, **{name: value}) == asked(path)
    prepare(path, NEEDED[path] | {name: value})


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "modalities", []),
        (CHAT, "functions", [{"name": "f"}]),
        (CHAT, "echo", True),
        (CHAT, "echo", 0),
        (CHAT, "best_of", True),
        (CHAT, "best_of", 2),
        (CHAT, "verbosity", "loud"),
        (COMPLETIONS, "suffix", "x"),
        (COMPLETIONS, "use_beam_search", True),
        (RESPONSES, "conversation", "conv_1"),
    ],
)
def test_unsupported_values_are_refused_by_name(path: str, name: str, value: Any) -> None:
    with pytest.raises(OpenAIError) as refused:
        asked(path, audio_is_next=None, **{name: value})
    assert (refused.value.status, refused.value.param) == (400, name)


def test_neutral_values_do_not_change_other_fields() -> None:
    fields = {"modalities": ["text"], "audio": None, "logit_bias": {"5": 1}, "seed": -1, "top_p": 0.5}
    prepared = prepare(CHAT, json.dumps(NEEDED[CHAT] | fields).encode())
    assert (prepared.params.logit_bias, prepared.params.top_p) == ({5: 1.0}, 0.5)
    assert prepare(CHAT, NEEDED[CHAT] | fields).params == prepared.params
    plain = {name: value for name, value in fields.items() if name not in ("modalities", "audio")}
    assert msgspec.json.encode(decode(CHAT, NEEDED[CHAT] | fields).body) == msgspec.json.encode(
        decode(CHAT, NEEDED[CHAT] | plain).body
    )


def test_wrong_fields_are_named_next_to_neutral_ones() -> None:
    with pytest.raises(OpenAIError) as refused:
        asked(CHAT, modalities=["text"], temperature="hot", no_such_field=1)
    assert refused.value.param == "temperature"


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        (CHAT, {"no_such_field": 1}, ("no_such_field",)),
        (CHAT, {"audio": {}, "web_search_options": {}, "modalities": ["text"]}, ("audio", "web_search_options")),
        (
            CHAT,
            {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            ("stream_options.continuous_usage_stats",),
        ),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "cache_control": {}, "defer_loading": True}}]},
            ("tools.function.cache_control", "tools.function.defer_loading"),
        ),
        (COMPLETIONS, {"return_token_ids": True}, ("return_token_ids",)),
        (RESPONSES, {"client_metadata": {"a": "b"}}, ("client_metadata",)),
        (RESPONSES, {"context_management": [{"type": "compaction"}]}, ("context_management",)),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, ("tools.web_search",)),
    ],
)
def test_unknown_fields_are_ignored_and_named(path: str, fields: dict[str, Any], ignored: tuple[str, ...]) -> None:
    for body in (NEEDED[path] | fields, json.dumps(NEEDED[path] | fields).encode()):
        assert decode(path, body).ignored == ignored
    prepare(path, NEEDED[path] | fields)
    with pytest.raises(OpenAIError) as refused:
        decode(path, NEEDED[path] | fields, strict=True)
    assert (refused.value.status, refused.value.param) == (400, ignored[0])
    assert decode(path, NEEDED[path], strict=True).ignored == ()


def test_names_from_callers_are_bounded_in_header_and_metric() -> None:
    assert header_value(["b", "a", "x\r\ny", "z" * 65]) == "a,b,other"
    many = header_value(f"field{number}" for number in range(100)).split(",")
    assert len(many) == 21
    assert many[-1] == "..."
    assert counted_name("client_metadata") == "client_metadata"
    assert counted_name("stream_options.continuous_usage_stats") == "stream_options"
    assert counted_name("made_up") == counted_name("tools.made_up") == "other"


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"enable_thinking": True}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"reasoning": {"effort": "max"}}, {"reasoning_effort": "max"}),
        ({"reasoning_effort": "max", "verbosity": "low"}, {"reasoning_effort": "max", "verbosity": "low"}),
        (
            {"chat_template_kwargs": {"thinking": True}, "enable_thinking": False},
            {"enable_thinking": False, "thinking": True},
        ),
    ],
)
def test_other_names_of_thinking_reach_the_template(fields: dict[str, Any], kwargs: dict[str, Any]) -> None:
    assert asked(CHAT, **fields)[2].get("chat_template_kwargs", {}) == kwargs


def test_a_limit_of_thinking_applies_to_models_that_can_keep_it() -> None:
    body = NEEDED[CHAT] | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert (
        prepare(CHAT, body, Parsers(reasoning="qwen3", thinks_before_grammar=True)).params.thinking_token_budget == 1024
    )
    assert prepare(CHAT, body).params.thinking_token_budget is None


def test_two_different_efforts_are_refused() -> None:
    with pytest.raises(OpenAIError) as refused:
        asked(CHAT, reasoning_effort="low", reasoning={"effort": "high"})
    assert refused.value.param == "reasoning.effort"
