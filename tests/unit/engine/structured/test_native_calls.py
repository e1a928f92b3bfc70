"""What xgrammar lets a model write under the grammar of a family's calls is what the family's parser reads."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import xgrammar

from penstock.producer.openai.tools.call_reader import joined
from penstock.producer.openai.tools.definitions import ToolChoice, read_tools
from penstock.producer.openai.tools.forcing import NativeCalls, native_calls
from penstock.producer.openai.tools.formats import TOOL_CALL_PARSERS
from penstock.producer.openai.tools.parser import ToolCallParser
from penstock.shared.params.answer_formats import TOOL_CALL_FORMATS

EOS = 256
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bonn", "New York"]},
        "days": {"enum": [1, 12]},
        "hours": {"type": "array", "items": {"enum": [7, 8]}, "minItems": 1, "maxItems": 2},
        "at": {
            "type": "object",
            "properties": {"name": {"enum": ["a < b"]}},
            "required": ["name"],
            "additionalProperties": False,
        },
        "wet": {"type": "boolean"},
    },
    "required": ["city", "days", "hours", "at", "wet"],
    "additionalProperties": False,
}
NOW: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = read_tools(
    [
        {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
        {"type": "function", "function": {"name": "now", "parameters": NOW}},
    ]
)
TOOLS: list[Any] = [function.for_template for function in FUNCTIONS]


def native_of(name: str, *, is_parallel: bool = True) -> NativeCalls:
    native = native_calls(TOOL_CALL_FORMATS[name].calls, FUNCTIONS, is_parallel=is_parallel)
    assert native is not None
    return native


SUPPORTED = [
    name for name, record in TOOL_CALL_FORMATS.items() if native_calls(record.calls, FUNCTIONS, is_parallel=True)
]
AROUND = ("<|close|>message<|sep|>", "<|close|>response<|sep|>", "</think>")  # written by xgrammar around calls
# xgrammar's name of a family and ours.
LIBRARY = {
    "llama": "llama3_json",
    "kimi": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "deepseek_r1": "deepseek_v3",
    "deepseek_v3_1": "deepseek_v31",
    "deepseek_v3_2": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "deepseek_v4_1": "deepseek_v41",
    "qwen_3": "hermes",
    "qwen_3_coder": "qwen3_coder",
    "mimo": "qwen3_coder",
    "minimax": "minimax_m2",
    "minimax_m3": "minimax_m3",
    "glm_4_7": "glm45",
    "exaone": "hermes",
}


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    return xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=[EOS])
    )


class Writer:
    """Writes random texts that a structural tag allows."""

    def __init__(self, compiler: xgrammar.GrammarCompiler, tag: Any) -> None:
        self._grammar = compiler.compile_structural_tag(tag)
        self._mask = xgrammar.allocate_token_bitmask(1, EOS + 1)

    def write(self, seed: int) -> str:
        """Return a text. It ends where it may, and chooses letters before whitespace and other characters."""
        matcher, chooser, text = xgrammar.GrammarMatcher(self._grammar), random.Random(seed), bytearray()
        while not matcher.is_terminated():
            matcher.fill_next_token_bitmask(self._mask)
            words = self._mask[0].tolist()
            allowed = [token for token in range(EOS + 1) if (words[token // 32] >> (token % 32)) & 1]
            token = EOS if EOS in allowed and chooser.random() < 0.7 else chooser.choice(allowed)
            matcher.accept_token(token)
            if token != EOS:
                text.append(token)
        return text.decode()


def read(name: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    call_format = TOOL_CALL_PARSERS[name].call_format
    assert call_format is not None
    parser = ToolCallParser(call_format, {function.name: function.parameters for function in FUNCTIONS}, whole=True)
    content, calls = joined(parser.feed(text) + parser.finish())
    for mark in AROUND:
        content = content.replace(mark, "")
    assert not content.strip(), text
    return [(function, json.loads(arguments)) for function, arguments in calls]


def check(calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert calls
    for name, arguments in calls:
        if name == "now":
            assert arguments == {}
            continue
        assert name == "weather"
        assert arguments["city"] in ("Bonn", "New York")
        assert arguments["days"] in (1, 12)
        assert set(arguments["hours"]) <= {7, 8}
        assert arguments["at"] == {"name": "a < b"}
        assert isinstance(arguments["wet"], bool)
        assert set(arguments) == set(WEATHER["properties"])


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("required", "weather")], ids=["any", "named"])
def test_forced_calls_are_read(compiler: xgrammar.GrammarCompiler, name: str, choice: ToolChoice) -> None:
    native = native_of(name, is_parallel=choice.name is None)
    tag = json.loads(native.forced(choice).structural_tag or "")
    writer = Writer(compiler, tag)
    for seed in range(8):
        calls = read(name, writer.write(seed))
        check(calls)
        if choice.name is not None:
            assert [function for function, _ in calls] == ["weather"]


@pytest.mark.parametrize(("library", "name"), LIBRARY.items())
def test_calls_under_the_grammars_of_xgrammar_are_read(
    compiler: xgrammar.GrammarCompiler, library: str, name: str
) -> None:
    tag = xgrammar.get_model_structural_tag(library, tools=TOOLS, tool_choice="required", reasoning=False)
    described = json.loads(tag.model_dump_json(exclude_none=True))
    limited = json.dumps(described).replace('"style": ', '"max_whitespace_cnt": 1, "style": ')
    limited = json.loads(limited.replace("\\\\d+", "\\\\d{1,2}"))
    # Free text around the calls would be most of what is written.
    writer = Writer(compiler, without_free_text(limited))
    for seed in range(6):
        check(read(name, writer.write(seed)))


def without_free_text(node: Any) -> Any:
    if isinstance(node, list):
        return [without_free_text(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "triggered_tags":
        return {
            "type": "tags_with_separator",
            "tags": without_free_text(node["tags"]),
            "separator": "",
            "at_least_one": True,
            "stop_after_first": False,
        }
    if node.get("type") == "any_text":
        return {"type": "const_string", "value": " "}
    return {key: without_free_text(value) for key, value in node.items()}


@pytest.mark.parametrize("name", SUPPORTED)
def test_calls_of_strict_functions_are_held_in_free_text(compiler: xgrammar.GrammarCompiler, name: str) -> None:
    native = native_of(name)
    if native.is_legacy:
        return  # test_tool_grammars has them
    grammar = compiler.compile_structural_tag(json.loads(getattr(native.optional(), "structural_tag", "")))
    forced = json.loads(native.forced(ToolChoice("required", "weather")).structural_tag or "")
    text = f"So {Writer(compiler, forced).write(1)}"
    assert xgrammar.GrammarMatcher(grammar).accept_string(text)
    assert not xgrammar.GrammarMatcher(grammar).accept_string(text.replace("weather", "whether"))
