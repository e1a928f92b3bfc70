"""Requests made of bodies, and the errors in them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.producer.openai.errors import OpenAIError, error_of
from penstock.producer.openai.parsers import Parsers
from penstock.shared import errors
from penstock.shared.params.structured import StructuredOutputsParams

from .generating import prepare

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


def test_developer_messages_are_those_of_the_system_unless_the_template_knows_the_role() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "developer", "content": "be"}]
    for takes_developer, role in ((False, "system"), (True, "developer")):
        prepared = prepare(CHAT, chat(messages=messages), Parsers(takes_developer=takes_developer))
        assert prepared.prompt == [messages[0], {"role": role, "content": "be"}]


def test_a_chat_becomes_messages_params_and_options() -> None:
    prepared = prepare(
        CHAT,
        b"""{"model": "m", "stream": true, "n": 2, "seed": -1, "logit_bias": {"5": 1}, "stop": "x", "top_p": null,
            "max_tokens": 5, "max_completion_tokens": 7, "logprobs": true, "top_logprobs": 3, "top_k": 4, "user": "u",
            "add_generation_prompt": false, "chat_template_kwargs": {"a": 1}, "cache_salt": "s", "priority": 3,
            "band": "batch", "timeout_s": 2.5, "guided_choice": ["a"], "metadata": {"k": "v"}, "store": false,
            "messages": [{"role": "developer", "content": "be"}, {"role": "user", "name": "Eve", "content": [
                {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}""",
    )
    assert prepared.prompt == [
        {"role": "system", "content": "be"},
        {"role": "user", "name": "Eve", "content": [{"type": "text", "text": text} for text in "ab"]},
    ]
    params = prepared.params
    assert (params.n, params.seed, params.logit_bias, params.stop) == (2, 2**63 - 1, {5: 1.0}, "x")
    assert (params.top_p, params.max_tokens, params.logprobs, params.top_k) == (1.0, 7, 3, 4)
    assert params.structured_outputs == StructuredOutputsParams(choice=["a"])
    assert prepared.options == {
        "model": "m",
        "band": "batch",
        "timeout_s": 2.5,
        "priority": 3,
        "cache_salt": "s",
        "chat_template_kwargs": {"a": 1, "add_generation_prompt": False},
    }
    assert (prepared.model, prepared.stream) == ("m", True)


@pytest.mark.parametrize(("path", "fields"), [(CHAT, chat()), (COMPLETIONS, {"model": "m", "prompt": "hi"})])
def test_logits_processors_are_chosen_as_vllm_has_it(path: str, fields: dict[str, Any]) -> None:
    expected = {"logits_processors": {"ban": {"token_ids": [5]}}}
    assert prepare(path, msgspec.json.encode(fields | {"vllm_xargs": expected})).params.extra_args == expected
    assert prepare(path, msgspec.json.encode(fields | {"vllm_xargs": {}})).params.extra_args is None
    for wrong in ({"logits_processors": ["ban"]}, {"my_own": 1}):
        with pytest.raises(OpenAIError) as caught:
            prepare(path, msgspec.json.encode(fields | {"vllm_xargs": wrong}))
        assert (caught.value.status, str(caught.value.param)[:10]) == (400, "vllm_xargs")


USER_WITH_NO_IMAGE = {"role": "user", "content": [{"type": "image_url"}]}


@pytest.mark.parametrize(
    ("fields", "session_id"),
    [
        ({"prompt_cache_key": "key"}, "key"),
        ({"prompt_cache_key": "key", "session_id": "own"}, "own"),
        ({"prompt_cache_key": "k" * 1000}, "k" * 512),
        ({"prompt_cache_key": ""}, None),
        ({"session_id": ""}, ""),  # refused when it is sent
        ({}, None),
    ],
    ids=str,
)
def test_a_cache_key_is_a_session(fields: dict[str, Any], session_id: str | None) -> None:
    assert prepare(CHAT, chat(**fields)).options.get("session_id") == session_id
    assert prepare(COMPLETIONS, {"prompt": "x", **fields}).options.get("session_id") == session_id


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_how_a_prompt_is_cut_is_an_option_of_the_request(path: str) -> None:
    body = chat() if path == CHAT else {"prompt": "x"}
    assert "tokenization_kwargs" not in prepare(path, body).options
    options = {"truncate_prompt_tokens": -1, "truncation_side": "right", "add_special_tokens": False}
    assert prepare(path, {**body, **options}).options.get("tokenization_kwargs") == options
    with pytest.raises(OpenAIError) as caught:
        prepare(path, {**body, "truncation_side": "middle"})
    assert caught.value.param == "truncation_side"


def test_a_chat_without_a_limit_goes_to_the_models_length_and_a_completion_to_16_tokens() -> None:
    assert prepare(CHAT, chat()).params.max_tokens is None
    assert prepare(COMPLETIONS, {"prompt": "x"}).params.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_a_completion_has_one_prompt_or_many(prompt: Any, prompts: Any) -> None:
    assert prepare(COMPLETIONS, {"prompt": prompt}).prompts == prompts


def test_echo_sets_the_parameters_that_its_answer_needs() -> None:
    assert prepare(COMPLETIONS, {"prompt": "x", "echo": True}).params.prompt_logprobs is None
    assert prepare(COMPLETIONS, {"prompt": [1], "echo": True}).params.prompt_logprobs == 0
    alone = prepare(COMPLETIONS, {"prompt": "x", "echo": True, "max_tokens": 0, "logprobs": 2}).params
    assert (alone.max_tokens, alone.logprobs, alone.prompt_logprobs) == (1, 2, 2)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat(temperature="hot"), "temperature"),
        (CHAT, chat(temperature=-1), "temperature"),
        (CHAT, chat(stream_options={"include_usage": "yes"}), "stream_options.include_usage"),
        (CHAT, chat(top_logprobs=2), "top_logprobs"),
        (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
        (CHAT, chat(max_completion_tokens=0), "max_tokens"),
        (CHAT, chat(logit_bias={"a": 1}), "logit_bias"),
        (CHAT, chat(structured_outputs={"regex": "a", "choice": ["b"]}), "structured_outputs"),
        (CHAT, chat(messages=[]), "messages"),
        (CHAT, chat(messages=[{"content": "x"}]), "messages[0].role"),
        (CHAT, chat(messages=[{"role": "user"}]), "messages[0].content"),
        (CHAT, chat(messages=[{"role": "user", "content": [{"type": "input_audio"}]}]), "messages[0].content[0].type"),
        (
            CHAT,
            chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "messages[0].content[0].image_url",
        ),
        (CHAT, chat(prediction="ab"), "prediction"),
        (CHAT, chat(prediction={"type": "text", "content": "ab"}), "prediction.type"),
        (CHAT, chat(prediction={"type": "content"}), "prediction.content"),
        (CHAT, chat(prediction={"type": "content", "content": [{"type": "refusal"}]}), "prediction.content[0].type"),
        (CHAT, {}, "messages"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
        (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "echo": True, "n": 2, "logprobs": 1}, "echo"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": [[1, 2], "x", []]}, "input[2]"),
        (EMBEDDINGS, {"input": ["x", 3]}, "input[1]"),
        (EMBEDDINGS, {"input": "x", "dimensions": 0}, "dimensions"),
        (EMBEDDINGS, {"input": "x", "encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_a_wrong_field_is_named(path: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(OpenAIError) as caught:
        prepare(path, body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.rsplit(".", maxsplit=1)[-1] in caught.value.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"messages": "\xff"}', b"{" * 2000])
def test_a_body_that_is_not_a_json_object_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(OpenAIError) as caught:
        prepare(CHAT, body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (errors.UnknownModelError("x"), 404, "model_not_found", None),
        (errors.QueueFullError("x", retry_after_s=2.2), 429, "queue_full", "3"),
        (errors.QuotaExceededError("x", retry_after_s=0.1), 429, "rate_limit_exceeded", "1"),
        (errors.PayloadTooLargeError("x"), 413, "payload_too_large", None),
        (errors.EngineDeadError("x"), 503, "engine_dead", "1"),
        (errors.RequestFailedError("x"), 500, "request_failed", None),
        (errors.PromptTooLongError("x"), 400, "context_length_exceeded", None),
        (KeyError("secret"), 500, "internal_error", None),
    ],
)
def test_our_errors_have_a_status_and_a_code(error: Exception, status: int, code: str, retry_after: str | None) -> None:
    detail = error_of(error)
    assert (detail.status, detail.error_code, detail.headers.get("Retry-After")) == (status, code, retry_after)
    assert "secret" not in detail.message


@pytest.mark.parametrize("content", ["ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]])
def test_a_prediction_is_text_or_parts_of_it(content: Any) -> None:
    prepared = prepare(CHAT, chat(prediction={"type": "content", "content": content}))
    assert prepared.options.get("prediction") == "ab"


@pytest.mark.parametrize(
    "answer",
    [
        {"content": None, "reasoning": "let me", "reasoning_content": "let me", "refusal": None},
        {"content": None, "refusal": None, "annotations": [], "audio": None},
        {"content": "", "tool_calls": None, "function_call": None},
        {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}]},
    ],
)
def test_an_answer_can_be_sent_back(answer: dict[str, Any]) -> None:
    messages: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", **answer}]
    if answer.get("tool_calls"):
        messages.append({"role": "tool", "tool_call_id": "c", "content": None})
    prompt: Any = prepare(CHAT, chat(messages=messages)).prompts[0]
    assert [message["content"] for message in prompt[1:]] == ([None, ""] if answer.get("tool_calls") else [""])
    assert prompt[1].get("reasoning") == answer.get("reasoning")
