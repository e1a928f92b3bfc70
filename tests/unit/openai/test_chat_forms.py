"""Tools, response formats and reasoning of a chat completion: the engine's request, and the form of the answer."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.producer.openai.endpoints import CHAT_COMPLETIONS
from penstock.producer.openai.errors import OpenAIError
from penstock.producer.openai.parsers import ParserChoice, Parsers
from penstock.producer.openai.prepared import Prepared
from penstock.producer.results import CompletionOutput, RequestOutput
from penstock.shared.deployment.records import ModelCard
from penstock.shared.errors import ConfigurationError, ValidationError
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.params.structured import GRAMMAR_FIELDS, StructuredOutputsParams

from .generating import prepare

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
PATCH: dict[str, Any] = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Changes files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"+'}},
    },
}
ITS_CHOICE = {"type": "custom", "custom": {"name": "patch"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}


def chat(reasoning: str = "none", tool_call: str = "hermes", *, thinks: bool = False, **fields: Any) -> Prepared:
    body = {"messages": [{"role": "user", "content": "Hot?"}], **fields}
    return prepare(CHAT_COMPLETIONS, body, Parsers(tool_call, reasoning, thinks))


def answered(
    prepared: Prepared, text: str, reason: FinishReason = FinishReason.STOP, *, inside: bool | None = None
) -> dict[str, Any]:
    """The only choice of the response."""
    output = CompletionOutput(index=0, text=text, token_ids=[1], finish_reason=reason, begins_in_reasoning=inside)
    whole = RequestOutput(request_id="r", model="m", prompt=None, outputs=[output], usage=None)
    return msgspec.to_builtins(prepared.answer(whole))["choices"][0]


def streamed(
    prepared: Prepared, *texts: str, reason: FinishReason = FinishReason.STOP, inside: bool | None = None
) -> dict[str, Any]:
    """The chunks of a stream, put together as a client does it."""
    chunks = prepared.events("r", "m")
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    finish_reason = None
    for index, text in enumerate(texts):
        is_last = index == len(texts) - 1
        delta = Delta(index=index, token_ids=[1], text=text, finish_reason=reason if is_last else None)
        delta.begins_in_reasoning = None if index else inside
        chunk = chunks.feed(delta)
        for choice in msgspec.to_builtins(chunk)["choices"] if chunk else ():
            finish_reason = choice["finish_reason"] or finish_reason
            message["content"] += choice["delta"].get("content", "")
            message["reasoning"] += choice["delta"].get("reasoning", "")
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    assert call.pop("index") == len(message["tool_calls"])
                    message["tool_calls"].append(call)
                else:
                    kind, text = ("custom", "input") if "custom" in call else ("function", "arguments")
                    message["tool_calls"][call["index"]][kind][text] += call[kind][text]
    return {"message": message, "finish_reason": finish_reason}


def test_tools_reach_the_template_unless_none_is_to_be_called() -> None:
    kwargs = chat(tools=[WEATHER]).options.get("chat_template_kwargs")
    assert kwargs == {"tools": [WEATHER]}
    assert chat(tools=[WEATHER], tool_choice="none").options.get("chat_template_kwargs") is None
    assert answered(chat(tools=[WEATHER], tool_choice="none"), CALL)["message"]["content"] == CALL


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("auto", CALL),
        ("required", '[{"name": "weather", "parameters": {"city": "Bonn"}}]'),
        ({"type": "function", "function": {"name": "weather"}}, '{"city": "Bonn"}'),
    ],
    ids=["auto", "required", "named"],
)
def test_a_call_is_parsed_the_same_whole_and_in_any_pieces(choice: Any, text: str) -> None:
    prepared = chat(tools=[WEATHER, NOW], tool_choice=choice)
    answer = answered(prepared, text)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Bonn"}'}
    assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
    for pieces in ([text], list(text), [text[:30], text[30:], ""]):
        answer = streamed(prepared, *pieces)
        assert (answer["message"]["tool_calls"], answer["finish_reason"]) == ([call], "tool_calls")
        assert answer["message"]["content"] == ""


def test_a_call_that_the_limit_cuts_keeps_its_reason() -> None:
    prepared = chat(tools=[WEATHER], tool_choice="required")
    text = '[{"name": "weather", "parameters": {"city": "Bo'
    for answer in (answered(prepared, text, FinishReason.LENGTH), streamed(prepared, text, reason=FinishReason.LENGTH)):
        assert answer["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Bo'
        assert answer["finish_reason"] == "length"


def test_without_parallel_calls_only_the_first_counts() -> None:
    prepared = chat(tools=[WEATHER, NOW], parallel_tool_calls=False)
    text = f'{CALL}\n<tool_call>{{"name": "now"}}</tool_call>'
    assert len(answered(prepared, text)["message"]["tool_calls"]) == 1
    assert len(streamed(prepared, *text)["message"]["tool_calls"]) == 1
    assert len(answered(chat(tools=[WEATHER]), text)["message"]["tool_calls"]) == 2
    constraint = chat(tools=[NOW], tool_choice="required", parallel_tool_calls=False).params.structured_outputs
    assert constraint is not None
    assert isinstance(constraint.json, dict)
    assert constraint.json["maxItems"] == 1


def test_reasoning_is_separated_in_answers_and_streams() -> None:
    text = f"<think>\nIs it?\n</think>\n\nI look.\n{CALL}"
    prepared = chat("qwen3", tools=[WEATHER])
    message = answered(prepared, text)["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("Is it?", "Is it?", "I look.")
    assert message["tool_calls"][0]["function"]["name"] == "weather"
    answer = streamed(prepared, *text)
    assert {name: message[name] for name in answer["message"]} == answer["message"]
    assert "reasoning" not in answered(chat("qwen3", include_reasoning=False), text)["message"]
    assert answered(chat("none"), text)["message"]["content"] == text


def test_the_prompt_may_have_begun_the_reasoning() -> None:
    def content(**fields: Any) -> str | None:
        return answered(chat("deepseek_r1", **fields), "Six.")["message"]["content"]

    assert content() is None
    assert content(chat_template_kwargs={"enable_thinking": False}) == "Six."
    assert content(reasoning_effort="none") == "Six."
    assert content(add_generation_prompt=False) == "Six."
    # A grammar holds from the first token on.
    assert content(structured_outputs={"regex": "Six."}) == "Six."
    assert content(response_format=SCHEMA) == "Six."


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
def test_the_worker_reports_for_each_prompt_whether_reasoning_has_begun(reasoning: str) -> None:
    """Whatever the usual prompt of the model does: a message, or a switch of any name, may change it."""

    def told(text: str, *, inside: bool, **fields: Any) -> tuple[str | None, str | None]:
        prepared = chat(reasoning, **fields)
        message = answered(prepared, text, inside=inside)["message"]
        pieces = streamed(prepared, *text, inside=inside)["message"]
        assert (pieces["reasoning"], pieces["content"]) == (message.get("reasoning", ""), message["content"] or "")
        return message.get("reasoning"), message["content"]

    assert told("Four</think>Six.", inside=True) == ("Four", "Six.")
    assert told("Four", inside=True) == ("Four", None)
    assert told("Six.", inside=False) == (None, "Six.")
    assert told("<think>Four</think>Six.", inside=False) == ("Four", "Six.")
    # The switch was set, but this template knows another one.
    assert told("Four</think>Six.", inside=True, chat_template_kwargs={"thinking": False}) == ("Four", "Six.")
    # A grammar holds from the first token on.
    assert told("Six.", inside=True, structured_outputs={"regex": "Six."}) == (None, "Six.")


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": SCHEMA},
        {"structured_outputs": {"json": CITY}},
        {"tools": [WEATHER], "tool_choice": "required"},
        {"response_format": SCHEMA, "thinking_token_budget": 9},
    ],
    ids=["format", "own", "calls", "budget"],
)
def test_a_model_thinks_before_it_follows_a_grammar(reasoning: str, fields: dict[str, Any]) -> None:
    prepared = chat(reasoning, thinks=True, **fields)
    constraint = prepared.params.structured_outputs
    assert constraint is not None
    assert constraint.enable_in_reasoning is None
    is_call = "tools" in fields
    answer = '[{"name": "weather", "parameters": {"city": "Bonn"}}]' if is_call else '{"city": "Bonn"}'
    text = ("<think>\n" if reasoning == "qwen3" else "") + f"Is it?\n</think>{answer}"
    message = answered(prepared, text)["message"]
    assert message["reasoning"] == "Is it?"
    if is_call:
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Bonn"}
    else:
        assert message["content"] == answer
    assert streamed(prepared, *text)["message"]["content"] == (message["content"] or "")
    # A model that answers at once, where the template leaves it the choice.
    if reasoning == "qwen3" and not is_call:
        assert answered(prepared, answer)["message"]["content"] == answer


def test_thinking_is_not_started_without_a_parser() -> None:
    constraint = chat("none", thinks=True, response_format=SCHEMA).params.structured_outputs
    assert constraint is not None
    assert constraint.enable_in_reasoning is True
    own = {"regex": "Six.", "enable_in_reasoning": True}
    message = answered(chat("deepseek_r1", thinks=True, structured_outputs=own), "Six.")["message"]
    assert message["content"] == "Six."


def test_special_tokens_are_requested_where_they_may_be_markers() -> None:
    assert not chat(tools=[WEATHER]).params.skip_special_tokens
    assert not chat("qwen3").params.skip_special_tokens
    for plain in (chat(), chat(tools=[WEATHER], tool_choice="none"), chat(tools=[WEATHER], tool_choice="required")):
        assert plain.params.skip_special_tokens


def test_constraints_of_the_output() -> None:
    constraint = chat(response_format=SCHEMA).params.structured_outputs
    assert constraint is not None
    assert constraint.json == CITY
    assert chat(tools=[WEATHER]).params.structured_outputs is None
    strict = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
    tagged = chat(tools=[strict]).params.structured_outputs
    assert tagged is not None
    assert tagged.structural_tag is not None
    assert json.loads(tagged.structural_tag)["triggers"] == ["<tool_call>"]
    assert chat(tool_call="mistral", tools=[strict]).params.structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": SCHEMA, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"response_format": SCHEMA, "tools": [WEATHER], "tool_call": "mistral"}, "response_format"),
        ({"structured_outputs": {"regex": "a"}, "tools": [WEATHER], "tool_choice": "required"}, "structured_outputs"),
        ({"reasoning_effort": "most"}, "reasoning_effort"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(OpenAIError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_body_without_end_is_refused() -> None:
    body = b'{"messages": [], "chat_template_kwargs": ' + b'{"a": ' * 100_000 + b"1" + b"}" * 100_001
    with pytest.raises(OpenAIError, match="nested too deep") as caught:
        prepare(CHAT_COMPLETIONS, body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "fields",
    [{"response_format": SCHEMA}, {"tools": [WEATHER], "tool_choice": "required"}],
    ids=["response format", "forced call"],
)
def test_an_engine_without_options_of_grammars_gets_none(fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hot?"}], **fields}
    for has_options in (True, False):
        grammar = prepare(CHAT_COMPLETIONS, body, Parsers(has_json_options=has_options)).params.structured_outputs
        assert grammar is not None
        assert (grammar.disable_any_whitespace, grammar.disable_additional_properties) == (has_options, has_options)


def test_parsers_are_those_of_the_card_unless_chosen() -> None:
    card, plain = ModelCard(model="m", tool_call_parser="mistral", reasoning_parser="qwen3"), ModelCard(model="p")
    thinking = ModelCard(model="t", reasoning_parser="qwen3", thinks_before_grammar=True)
    assert ParserChoice().for_model(thinking) == Parsers("hermes", "qwen3", thinks_before_grammar=True)
    assert ParserChoice().for_model(card) == Parsers("mistral", "qwen3")
    assert ParserChoice().for_model(ModelCard(model="d", takes_developer=True)) == Parsers(takes_developer=True)
    assert ParserChoice().for_model(plain) == ParserChoice().for_model(None) == Parsers("hermes", "none")
    assert ParserChoice(tool_call="llama3_json", reasoning="none").for_model(card) == Parsers("llama3_json", "none")
    for wrong in ({"tool_call": "x"}, {"reasoning": "x"}):
        with pytest.raises(ConfigurationError, match=r"_parser must be one of .* got 'x'"):
            ParserChoice(**wrong)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_cut_of_a_stream_gives_the_same_messages(data: st.DataObject) -> None:
    fragments = [
        "<think>",
        "</think>",
        CALL,
        "<tool_call>",
        " ",
        "\n",
        "so",
        '{"name": "now", "arguments": {"a": ',
        "}",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=8)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    prepared = chat("qwen3", tools=[WEATHER, NOW], stream=True)
    assert streamed(prepared, *pieces) == streamed(prepared, text)


@pytest.mark.parametrize(
    "arguments", ['{"input": "a\\n\\"b"}', '{"input":"a\\n\\u0022b"}', '{"x": 1, "input": "a\\n\\"b"}']
)
def test_calls_of_custom_tools_have_an_input(arguments: str) -> None:
    prepared = chat(tools=[NOW, PATCH], stream=True)
    text = f'<tool_call>{{"name": "patch", "arguments": {arguments}}}</tool_call>{CALL}'
    for answer in (answered(prepared, text), streamed(prepared, text), streamed(prepared, *text)):
        patch, weather = answer["message"]["tool_calls"]
        assert (patch["type"], patch["custom"]) == ("custom", {"name": "patch", "input": 'a\n"b'})
        assert (weather["type"], "custom" in weather) == ("function", False)
        assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", [ITS_CHOICE, "required"], ids=["named", "required"])
def test_a_forced_answer_is_the_input_of_a_custom_tool(choice: Any) -> None:
    prepared = chat(tools=[PATCH], tool_choice=choice, stream=True)
    assert prepared.params.structured_outputs == StructuredOutputsParams(grammar='start: "a"+')
    for text in ("aaa", ' {"input": "a"}', "\n\\"):
        for answer in (answered(prepared, text), streamed(prepared, text), streamed(prepared, *text)):
            (call,) = answer["message"]["tool_calls"]
            assert call["custom"] == {"name": "patch", "input": text}
            assert (answer["finish_reason"], answer["message"]["content"] or "") == ("tool_calls", "")
    cut = answered(prepared, "aa", FinishReason.LENGTH)
    assert (cut["message"]["tool_calls"][0]["custom"]["input"], cut["finish_reason"]) == ("aa", "length")
    assert streamed(prepared, "")["message"]["tool_calls"][0]["custom"] == {"name": "patch", "input": ""}
    refused = ValidationError("structured_outputs.grammar is refused by llguidance: nope")
    message = "^tools: the grammar of 'patch' is refused by llguidance: nope$"
    with pytest.raises(ValidationError, match=message), prepared.naming_fields():
        raise refused


def test_thinking_precedes_the_input_of_a_custom_tool() -> None:
    prepared = chat("qwen3", tools=[PATCH], tool_choice=ITS_CHOICE, thinks=True, stream=True)
    text = "<think>\nSo.\n</think>aa"
    for answer in (answered(prepared, text), streamed(prepared, *text)):
        assert (answer["message"]["reasoning"], answer["message"]["tool_calls"][0]["custom"]["input"]) == ("So.", "aa")


@pytest.mark.parametrize(
    ("parsers", "choice", "expected"),
    [
        (Parsers(forces_natively=True), ITS_CHOICE, "structural_tag"),
        (Parsers(forces_natively=True), "auto", "structural_tag"),
        (Parsers(), "auto", None),  # llguidance has no structural tag for it
        (Parsers(has_structural_tags=False), ITS_CHOICE, "json"),  # llama-server takes no Lark
        (Parsers("mistral", forces_natively=True), ITS_CHOICE, "grammar"),
        (Parsers("mistral", forces_natively=True), "auto", None),
        (Parsers(), "required", "json"),
    ],
)
def test_the_grammar_of_an_input_is_enforced_where_the_engine_can(
    parsers: Parsers, choice: Any, expected: str | None
) -> None:
    body = {"messages": [{"role": "user", "content": "Hot?"}], "tools": [NOW, PATCH], "tool_choice": choice}
    constraint = prepare(CHAT_COMPLETIONS, body, parsers).params.structured_outputs
    kinds = [] if constraint is None else [kind for kind in GRAMMAR_FIELDS if getattr(constraint, kind) is not None]
    assert kinds == ([] if expected is None else [expected])
    if expected == "structural_tag":
        assert constraint is not None
        assert "tool_input" in str(constraint.structural_tag)


def test_custom_calls_in_messages_reach_the_template_as_functions() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": '"a"'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hot?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    prompt: Any = prepare(CHAT_COMPLETIONS, {"messages": messages, "tools": [PATCH]}).prompt
    function = {"name": "patch", "arguments": '{"input": "\\"a\\""}'}
    assert prompt[1]["tool_calls"] == [{"id": "c", "type": "function", "function": function}]
    del call["custom"]["input"]
    with pytest.raises(OpenAIError, match=r"messages\[1\]\.tool_calls\[0\]\.custom\.input must be text"):
        prepare(CHAT_COMPLETIONS, {"messages": messages})
