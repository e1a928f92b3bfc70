"""Examples of each family's calls are read alike in one piece, character by character and in any other pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.producer.openai.tools.call_reader import joined
from penstock.producer.openai.tools.formats import TOOL_CALL_PARSERS
from penstock.producer.openai.tools.parser import ToolCallParser

# harmony has a test of its own: its calls are in channels
FORMATS = {name: style.call_format for name, style in TOOL_CALL_PARSERS.items() if style.call_format is not None}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "hours": {"type": "array", "items": {"type": "integer"}},
        "unit": {"enum": ["C", "F"]},
        "at": {"$ref": "#/$defs/place"},
        "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "code": {"type": "string"},
        "wet": {"type": "boolean"},
        "any": {},
    },
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}}},
}
SCHEMAS: dict[str, dict[str, Any]] = {"weather": WEATHER, "now": {"type": "object"}}
BONN = ("weather", {"city": "Bonn", "days": 2})
NOW = ("now", {})
CODE = 'if a < 1:\n    b = "</p>"\n'


def dsml(tool_calls: str, blank: str = "") -> str:
    tag, end = f"<｜DSML｜{blank}", f"</｜DSML｜{blank}"
    return (
        f"\n\n{tag}{tool_calls}>\n"
        f'{tag}invoke name="weather">\n{tag}parameter name="city" string="true">Bonn{end}parameter>\n'
        f'{tag}parameter name="days" string="false">2{end}parameter>\n{end}invoke>\n'
        f'{tag}invoke name="now">\n{end}invoke>\n{end}{tool_calls}>'
    )


M3 = "]<]minimax[>["
EXAMPLES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "qwen3_coder",
        "I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "I look.",
        [BONN, NOW],
    ),
    (
        "qwen3_coder",
        "<function=weather><parameter=city>Bonn</parameter><parameter=days>2</parameter></function></tool_call> Done.",
        " Done.",
        [BONN],
    ),
    (
        "qwen3_coder",
        f"<tool_call>\n<function=weather>\n<parameter=code>\n{CODE}\n</parameter>\n<parameter=hours>\n[1, 2]\n"
        "</parameter>\n<parameter=unit>\nC\n</parameter>\n<parameter=limit>\nnull\n</parameter>\n<parameter=wet>\nTrue\n"
        '</parameter>\n<parameter=at>\n{"lat": 1.5}\n</parameter>\n<parameter=any>\n007\n</parameter>\n'
        "<parameter=days>\nmany\n</parameter>\n</function>\n</tool_call>",
        "",
        [
            (
                "weather",
                {
                    "code": CODE,
                    "hours": [1, 2],
                    "unit": "C",
                    "limit": None,
                    "wet": True,
                    "at": {"lat": 1.5},
                    "any": "007",
                    "days": "many",
                },
            )
        ],
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Bonn</parameter>\n<parameter=days>2</parameter>\n"
        "</function>\n</seed:tool_call>",
        "",
        [BONN],
    ),
    (
        "glm45",
        "Well\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        "Well",
        [BONN, NOW],
    ),
    (
        "glm45",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Bonn</arg_value><arg_key>days</arg_key>"
        "<arg_value>2</arg_value></tool_call>",
        "",
        [BONN],
    ),
    (
        "hy_v3",
        "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now<tool_sep></tool_call>\n"
        "</tool_calls>",
        "",
        [BONN, NOW],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Bonn</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        [BONN, NOW],
    ),
    (
        "minimax_m3",
        f'{M3}<tool_call>\n{M3}<invoke name="weather">{M3}<city>Bonn{M3}</city>{M3}<days>2{M3}</days>{M3}<hours>'
        f"{M3}<item>1{M3}</item>{M3}<item>2{M3}</item>{M3}</hours>{M3}<at>{M3}<lat>1.5{M3}</lat>{M3}<name>a < b"
        f"{M3}</name>{M3}</at>{M3}</invoke>\n{M3}</tool_call>",
        "",
        [("weather", {"city": "Bonn", "days": 2, "hours": [1, 2], "at": {"lat": 1.5, "name": "a < b"}})],
    ),
    ("deepseek_v32", f"So:{dsml('function_calls')}", "So:", [BONN, NOW]),
    ("deepseek_v4", dsml("tool_calls"), "", [BONN, NOW]),
    ("deepseek_v4", dsml("tool"), "", [BONN, NOW]),
    ("deepseek_v41", dsml("calls", " "), "", [BONN, NOW]),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Bonn", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n'
        "{}\n"
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [BONN, NOW],
    ),
    (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Bonn", "days": 2}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [BONN, NOW],
    ),
    (
        "kimi_k2",
        "Wait.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Bonn", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "Wait.",
        [BONN, NOW],
    ),
    (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"'
        '<|sep|>Bonn<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        "",
        [BONN, NOW],
    ),
    (
        "gemma4",
        '<|tool_call>call:weather{city:<|"|>Bonn<|"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>',
        "",
        [BONN, NOW],
    ),
    (
        "gemma4",
        '<|tool_call>call:weather{code:<|"|>a "b" \\n {c}\n<|"|>,hours:[1, 2],at:{lat:-1.5e3,name:<|"|><|"|>},wet:true,'
        "limit:null}<tool_call|>",
        "",
        [
            (
                "weather",
                {
                    "code": 'a "b" \\n {c}\n',
                    "hours": [1, 2],
                    "at": {"lat": -1500.0, "name": ""},
                    "wet": True,
                    "limit": None,
                },
            )
        ],
    ),
    (
        "functiongemma",
        "<start_function_call>call:weather{city:<escape>Bonn<escape>,days:2}<end_function_call>",
        "",
        [BONN],
    ),
    (
        "granite",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}, '
        '{"name": "now", "arguments": {}}]',
        "",
        [BONN, NOW],
    ),
    ("granite", '<tool_call>[{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}]', "", [BONN]),
    (
        "hunyuan_a13b",
        '<tool_calls>[{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}]</tool_calls>',
        "",
        [BONN],
    ),
    ("phi4_mini_json", 'functools[{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}]', "", [BONN]),
    (
        "cohere",
        'Plan.<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
        '{"city": "Bonn", "days": 2}},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]'
        "<|END_ACTION|>",
        "Plan.",
        [BONN, NOW],
    ),
    (
        "apertus",
        '<|tools_prefix|>[{"weather": {"city": "Bonn", "days": 2}}, {"now": {}}]<|tools_suffix|>',
        "",
        [BONN, NOW],
    ),
    ("olmo3", '<function_calls>\nweather(city="Bonn", days=2)\nnow()\n</function_calls>', "", [BONN, NOW]),
    (
        "lfm2",
        "Let me see. <|tool_call_start|>[weather(city='Bonn', days=2), now()]<|tool_call_end|>I checked.",
        "Let me see.I checked.",
        [BONN, NOW],
    ),
    (
        "lfm2",
        '<|tool_call_start|>[{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}]<|tool_call_end|>',
        "",
        [BONN],
    ),
    ("llama4_pythonic", '<|python_start|>[weather(city="Bonn", days=2)]<|python_end|>', "", [BONN]),
    ("llama4_pythonic", ' [weather(city="Bonn", days=2), now()]', "", [BONN, NOW]),
    (
        "pythonic",
        r"[weather(code='it\'s\n\u00e9\x41\ud83d\ude00\q', hours=[1, 2,], at={'lat': -.5, 'name': None}, wet=True, "
        "days=1_000)]",
        "",
        [
            (
                "weather",
                {
                    "code": "it's\néA😀\\q",
                    "hours": [1, 2],
                    "at": {"lat": -0.5, "name": None},
                    "wet": True,
                    "days": 1000,
                },
            )
        ],
    ),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[print(a=1)]", "[print(a=1)]", []),
    ("pythonic", "[]", "[]", []),
    ("xlam", '[{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}]', "", [BONN]),
    ("xlam", '```json\n[{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}]\n```', "", [BONN]),
    ("xlam", '<tool_call>{"name": "now", "arguments": {}}', "", [NOW]),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{"city": "Bonn", "days": 2}', "", [BONN]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}</tool_call>', "", [BONN]),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Bonn", "days": 2}}', "", [BONN]),
]
EXAMPLE_IDS = [f"{name}-{index}" for index, (name, *_) in enumerate(EXAMPLES)]


def parsed(name: str, *texts: str, whole: bool = False, is_cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(FORMATS[name], SCHEMAS, whole=whole)
    pieces = [piece for text in texts for piece in parser.feed(text)]
    return joined(pieces + parser.finish(is_cut=is_cut))


def test_each_format_has_an_example() -> None:
    assert {name for name, *_ in EXAMPLES} == set(FORMATS)


@pytest.mark.parametrize(("name", "text", "content", "calls"), EXAMPLES, ids=EXAMPLE_IDS)
@pytest.mark.parametrize("whole", [True, False])
def test_an_example_is_read_alike_wherever_it_is_cut(
    name: str, text: str, content: str, calls: list[tuple[str, Any]], whole: bool
) -> None:
    read = parsed(name, text, whole=whole)
    assert (read[0], [(function, json.loads(arguments)) for function, arguments in read[1]]) == (content, calls)
    assert parsed(name, *text, whole=whole) == read
    for cut in range(0, len(text), 7):
        assert parsed(name, text[:cut], text[cut:], whole=whole) == read


@pytest.mark.parametrize(("name", "text", "content", "calls"), EXAMPLES, ids=EXAMPLE_IDS)
def test_an_example_that_ends_anywhere_loses_nothing_and_repeats_nothing(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    for end in range(0, len(text), 3):
        part = text[:end]
        whole_content, whole_calls = parsed(name, part, whole=True)
        for function, arguments in whole_calls:
            assert isinstance(json.loads(arguments), dict)
            assert function in SCHEMAS
        if not whole_calls:
            assert whole_content == part
        cut = parsed(name, part, is_cut=True)
        assert [call for call in whole_calls if call not in cut[1]] == []


def test_strings_are_streamed_and_other_values_come_complete() -> None:
    parser = ToolCallParser(FORMATS["qwen3_coder"], SCHEMAS)
    arguments = []
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n12\n</parameter>\n"
    for piece in (text, "</function>", "\n</tool_call>"):
        arguments.append(joined(parser.feed(piece)) if not arguments else parser.feed(piece))
    assert arguments[0] == ("", [("weather", '{"city": "Bonn", "days": 12')])
    parser = ToolCallParser(FORMATS["qwen3_coder"], SCHEMAS)
    parser.feed("<function=weather>\n<parameter=city>\nBo")
    assert [getattr(piece, "arguments", None) for piece in parser.feed("nn <")] == ["nn "]
    assert [getattr(piece, "arguments", None) for piece in parser.feed("b>\n")] == ["<b>"]


def test_the_model_s_own_ids_are_kept() -> None:
    text = next(text for name, text, *_ in EXAMPLES if name == "kimi_k2")
    parser = ToolCallParser(FORMATS["kimi_k2"], SCHEMAS)
    pieces = [piece for char in text for piece in parser.feed(char)] + parser.finish()
    ids = [getattr(piece, "call_id", None) for piece in pieces if getattr(piece, "name", None)]
    assert ids == ["functions.weather:0", "functions.now:1"]
    again = text.replace("functions.now:1", "functions.weather:0")
    parser = ToolCallParser(FORMATS["kimi_k2"], SCHEMAS)
    ids = [getattr(piece, "call_id", None) for piece in parser.feed(again) if getattr(piece, "name", None)]
    assert ids == ["functions.weather:0", None]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_marker_without_a_call_is_content(name: str) -> None:
    for marker in FORMATS[name].markers:
        for text in (marker, f"{marker}\n", f"So {marker} is a mark. {marker}", f"{marker}]", f"{marker}\n]"):
            assert parsed(name, text, whole=True) == parsed(name, *text) == (text, [])


def test_a_parameter_that_is_repeated_ends_the_call() -> None:
    text = "<function=weather><parameter=city>A</parameter><parameter=city>B</parameter></function>"
    assert parsed("qwen3_coder", text, whole=True) == (text, [])
    assert parsed("qwen3_coder", text)[1] == [("weather", '{"city": "A"')]


FRAGMENTS = sorted(
    {
        fragment
        for _, text, *_ in EXAMPLES
        for fragment in [text[start : start + size] for size in (9, 23) for start in range(0, len(text), size)]
    }
)


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = "".join(draw(st.lists(st.sampled_from([*FRAGMENTS, *(text for _, text, *_ in EXAMPLES)]), max_size=8)))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(cuts)]


@settings(max_examples=600, deadline=None)
@given(cut_texts(), st.sampled_from(sorted(FORMATS)), st.booleans(), st.booleans())
def test_any_cutting_of_any_text_gives_the_same(texts: list[str], name: str, whole: bool, is_cut: bool) -> None:
    text = "".join(texts)
    read = parsed(name, text, whole=whole, is_cut=is_cut)
    assert parsed(name, *texts, whole=whole, is_cut=is_cut) == read
    assert parsed(name, *text, whole=whole, is_cut=is_cut) == read
    if not read[1]:
        assert read[0] == text
    if whole and not is_cut:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in read[1])
