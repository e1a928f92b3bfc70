"""Whatever a caller passes as a string is sent, or refused by an error of ours that names the field and is short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.producer.inputs.options import RequestOptions
from penstock.producer.inputs.prompt import as_prompts, build_chunk, build_request
from penstock.producer.inputs.prompt_lists import pairs_of
from penstock.producer.requests.fan_out import children
from penstock.producer.requests.queue_entry import Outgoing, num_chunk_tokens
from penstock.producer.webhooks.targets import webhook_target
from penstock.shared.control.engine import CollectiveRpc, WakeUp
from penstock.shared.control.model import SaveShardedState, Tokenize
from penstock.shared.deployment.records import ModelCard
from penstock.shared.errors import PenstockError, UnsupportedParameterError, ValidationError
from penstock.shared.params.lora import LoRARequest
from penstock.shared.params.sampling import SamplingParams
from penstock.shared.params.structured import StructuredOutputsParams

CARD = ModelCard(model="m")
USER = {"role": "user", "content": "hi"}
MAX_CHARS = 1000


def send(prompt: Any = "hi", params: SamplingParams | None = None, **options: Any) -> None:
    """All that a client does to a request before Redis has it."""
    request_options = RequestOptions(**options)
    request = build_request(prompt, params, card=CARD, options=request_options)
    for one in children(request):
        outgoing = Outgoing(one, request_options, 0, webhook_target(request, options), request.request_id)
        outgoing.entry(result_ttl_ms=1, fail_fast=False, max_payload_bytes=1 << 22)


def send_tool(name: Any) -> None:
    send([USER], chat_template_kwargs={"tools": [{"function": {"name": name}}]})


FIELDS: dict[str, Callable[[Any], Any]] = {
    "prompt": lambda value: send(value),
    "a chunk of input": lambda value: num_chunk_tokens(build_chunk(value, CARD)),
    "messages[0].role": lambda value: send([{**USER, "role": value}]),
    "messages[0].content": lambda value: send([{**USER, "content": value}]),
    "messages[0].content[0].text": lambda value: send([{**USER, "content": [{"type": "text", "text": value}]}]),
    "messages[0].content[0].type": lambda value: send([{**USER, "content": [{"type": value, "text": "a"}]}]),
    "messages[1].name": lambda value: send([USER, {**USER, "name": value}]),
    "a key of messages[0]": lambda value: send([{**USER, value: 1}]),
    "messages[0].tool_calls[0].function.arguments": lambda value: send(
        [{**USER, "tool_calls": [{"function": {"arguments": value}}]}]
    ),
    "chat_template_kwargs.tools[0].function.name": send_tool,
    "a key of chat_template_kwargs": lambda value: send([USER], chat_template_kwargs={value: 1}),
    "request_id": lambda value: send(request_id=value),
    "tenant": lambda value: send(tenant=value),
    "band": lambda value: send(band=value),
    "cache_salt": lambda value: send(cache_salt=value),
    "session_id": lambda value: send(session_id=value),
    "trace_headers": lambda value: send(trace_headers={"traceparent": value}),
    "a name of trace_headers": lambda value: send(trace_headers={value: "a"}),
    "webhook_url": lambda value: send(webhook_url=value),
    "webhook_events": lambda value: send(webhook_url="https://a.example", webhook_events=value),
    "stop": lambda value: send(params=SamplingParams(stop=value)),
    "stop[1]": lambda value: send(params=SamplingParams(stop=["a", value])),
    "bad_words[0]": lambda value: send(params=SamplingParams(bad_words=[value])),
    "extra_args": lambda value: send(params=SamplingParams(extra_args={"a": value})),
    "structured_outputs.regex": lambda value: StructuredOutputsParams(regex=value),
    "structured_outputs.choice": lambda value: StructuredOutputsParams(choice=[value]),
    "structured_outputs.grammar": lambda value: StructuredOutputsParams(grammar=value),
    "structured_outputs.json": lambda value: StructuredOutputsParams(json={"title": value}),
    "lora_name": lambda value: LoRARequest(value, 1, "/a"),
    "lora_path": lambda value: LoRARequest("a", 1, value),
    "base_model_name": lambda value: LoRARequest("a", 1, "/a", value),
    "path": lambda value: SaveShardedState(f"/{value}"),
    "pattern": lambda value: SaveShardedState("/a", f"{value}{{part}}.safetensors"),
    "method": lambda value: CollectiveRpc(value),
    "tags": lambda value: WakeUp([value]),
    "prompt ": lambda value: Tokenize(prompt=value),
}
# Some are named as a whole where one of their parts is wrong.
WHOLE = {
    "stop[1]": "stop",
    "bad_words[0]": "bad_words",
    "messages[0].content[0].type": "messages[0].content[0]",
    "a name of trace_headers": "trace_headers",
    "a key of chat_template_kwargs": "chat_template_kwargs",
}


def check(field: str, value: Any, *, is_refused: bool | None = None) -> None:
    try:
        FIELDS[field](value)
    except PenstockError as error:
        message, name = str(error), field.strip()
        assert len(message) < MAX_CHARS
        assert message.encode()
        assert message.startswith((name, WHOLE.get(field, name)))
        assert is_refused is not False
    else:
        assert not is_refused


@pytest.mark.parametrize("field", FIELDS)
def test_half_a_surrogate_pair_is_refused_by_the_fields_name(field: str) -> None:
    for value in ("\ud800", "hi\udcff", "a" * 300 + "\udfff"):
        check(field, value, is_refused=True)


@pytest.mark.parametrize("field", FIELDS)
def test_a_megabyte_is_sent_or_refused_in_a_short_message(field: str) -> None:
    check(field, "x" * 1_000_000)


@settings(deadline=None)
@given(st.sampled_from(sorted(FIELDS)), st.text(st.characters()))
def test_any_text_is_sent_or_refused_by_the_fields_name(field: str, value: str) -> None:
    check(field, value)


@pytest.mark.parametrize("content", [object(), {1, 2}, 5, {"a": 1}, b"hi", [5], [{"text": "a"}], ["a"]])
def test_a_content_that_is_no_text_is_refused(content: Any) -> None:
    with pytest.raises(ValidationError, match=r"^messages\[0\]\.content"):
        send([{"role": "user", "content": content}])


@pytest.mark.parametrize("value", [object(), {1: object()}, 2**70])
def test_values_that_json_cannot_encode_are_named(value: Any) -> None:
    for field in ("messages[1].name", "chat_template_kwargs.tools[0].function.name"):
        with pytest.raises(ValidationError) as caught:
            FIELDS[field](value)
        assert str(caught.value).startswith((field, f"a key of {field}"))


def test_addresses_of_images_are_refused() -> None:
    parts = [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {"url": "https://a.example"}}]
    message = r"^messages\[0\]\.content\[1\]\.image_url\.url is the address of an image"
    with pytest.raises(UnsupportedParameterError, match=message):
        send([{"role": "user", "content": parts}])


@pytest.mark.parametrize("value", [5, None, 1.5, object()])
def test_values_that_are_no_prompts_are_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match=r"^prompts must be a prompt or a list of prompts, got"):
        as_prompts(value)


@pytest.mark.parametrize(
    ("texts", "others", "message"),
    [
        (5, ["a"], "texts must be a text or a list of texts, got 5"),
        ("a", None, "others must be a text or a list of texts, got None"),
        ("a", ["b", ""], r"others\[1\] must be a text that is not empty, got ''"),
        ("", ["b"], "texts must be a text that is not empty, got ''"),
        (["a", 5], ["b", "c"], r"texts\[1\] must be a text that is not empty, got 5"),
        (["a", "b"], ["c"], r"texts must be one, or as many as the others \(1\), got 2"),
        ("a", [], r"texts must be one, or as many as the others \(0\), got 0"),
    ],
)
def test_unpaired_texts_are_refused_by_position(texts: Any, others: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=f"^{message}"):
        pairs_of(texts, others)


def test_ids_have_a_longest_length() -> None:
    for field in ("request_id", "tenant", "band"):
        check(field, "x" * 200, is_refused=False)
        check(field, "x" * 201, is_refused=True)


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800"])
def test_a_path_that_no_file_system_takes_is_named(path: str) -> None:
    with pytest.raises(ValidationError, match="lora_path must be"):
        LoRARequest("cats", 1, path)
