"""Tools, tool calls and results in chat templates of the kinds that models on the hub have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer

from penstock.shared.params.answer_formats import REASONING_FORMATS, TOOL_CALL_FORMATS
from penstock.worker.text.chat_style import ChatStyle, style_of
from penstock.worker.text.chat_template import ChatTemplate
from penstock.worker.text.tokenizer import TextCodec

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
TOOLS_FIRST = """\
{%- if tools is not none %}
    {%- for tool in tools %}{{ tool | tojson(separators=(',', ':')) }}
    {%- endfor %}
{% endif %}"""
TURN = "{%- if message.role != 'assistant' %}[{{ message.role }}]{{ message.content }}\n{%- endif %}"

# As Qwen and Hermes have it: the object is made JSON; a text would be quoted once more.
HERMES = (
    TOOLS_FIRST
    + """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}[assistant]{{ message.content if message.content else '' }}
        {%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
    {%- endif %}
    """
    + TURN
    + """\
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
)

# As DeepSeek has it: the arguments are concatenated, and a call is one only without content.
CONCATENATED = (
    TOOLS_FIRST
    + """\
{%- for message in messages %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for call in message['tool_calls'] %}{{ 'call ' + call['function']['arguments'] }}{% endfor %}
    {%- elif message['role'] == 'assistant' %}{{ message['content'].split('</think>')[-1] }}
    {%- endif %}
    """
    + TURN
    + """\
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]<think>\\n' }}{% endif %}"""
)

# Content is concatenated, too: None would fail.
CONTENT_FIRST = (
    TOOLS_FIRST
    + """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{{ '[assistant]' + message.content }}
        {%- for call in message.tool_calls or [] %}[TOOL_CALLS]{{ call.function | tojson }}{% endfor %}
    {%- endif %}
    """
    + TURN
    + """\
{%- endfor %}"""
)


def conversation(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "a1b2c3d4e"},
    ]


@pytest.mark.parametrize(
    ("source", "target", "called"),
    [
        (HERMES, {"a": 1}, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
        (CONCATENATED, '{"a": 1}', 'call {"a": 1}'),
        (CONTENT_FIRST, {"a": 1}, '[TOOL_CALLS]{"name": "add", "arguments": {"a": 1}}'),
    ],
    ids=["hermes", "concatenated", "content first"],
)
def test_calls_are_rendered_whichever_way_the_template_wants_their_arguments(
    source: str, target: Any, called: str
) -> None:
    template = ChatTemplate(source, {})
    rendered = [template.render(conversation(arguments), {"tools": [TOOL]}) for arguments in ({"a": 1}, '{"a": 1}')]
    assert rendered[0] == rendered[1]
    assert called in rendered[0]
    assert json.dumps(TOOL, separators=(",", ":")) in rendered[0]
    assert "[tool]3" in rendered[0]
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = conversation(target)
    if source is CONTENT_FIRST:
        messages[1]["content"] = ""
    expected = transformers.render_jinja_template([messages], [TOOL], None, source, add_generation_prompt=True)[0]
    assert rendered[0] == expected[0]


def test_arguments_that_are_no_json_stay_as_the_model_wrote_them() -> None:
    rendered = ChatTemplate(HERMES, {}).render(conversation('{"a": '), {"tools": [TOOL]})
    assert '"arguments": "{\\"a\\": "' in rendered
    assert '"arguments": {}' in ChatTemplate(HERMES, {}).render(conversation(""), {})


@pytest.mark.parametrize(
    ("arguments", "parameters"),
    [
        ('{"a": 1}', "<a>1</a>"),
        ("null", ""),
        ("", ""),
        ('{"a": ', '<arguments>{"a": </arguments>'),
        ("[1]", "<arguments>[1]</arguments>"),
    ],
)
def test_a_template_that_iterates_over_arguments_gets_an_object(arguments: str, parameters: str) -> None:
    """Renders calls as the templates of Qwen3-Coder and GLM do."""
    source = HERMES.replace(
        "{{ call.function.arguments | tojson }}",
        "{% for name, value in call.function.arguments | items %}<{{ name }}>{{ value }}</{{ name }}>{% endfor %}",
    )
    rendered = ChatTemplate(source, {}).render(conversation(arguments), {"tools": [TOOL]})
    assert f'"arguments": {parameters}}}' in rendered


def test_an_empty_tool_list_is_none_as_in_transformers() -> None:
    template = ChatTemplate("{{ tools is none }}{{ documents is none }}", {})
    assert template.render([], {}) == "TrueTrue"


def test_fields_that_are_none_are_left_out() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{{ 'tool_calls' in m }}{% endfor %}", {})
    assert template.render([{"role": "assistant", "content": "6", "tool_calls": None, "audio": None}], {}) == "6False"


def test_reasoning_is_available_under_each_of_its_names() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}", {})
    assert template.render([{"role": "assistant", "content": "6", "reasoning": "4 + 2"}], {}) == "4 + 24 + 2"


def test_a_template_for_tools_takes_the_place_of_the_default_where_there_are_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    for config in ({"chat_template": named}, {"chat_template": "plain"}):
        template = ChatTemplate.load(tmp_path, config)
        assert template is not None
        assert (template.render([], {}), template.render([], {"tools": [TOOL]})) == ("plain", "with tools")


def test_the_template_shows_how_calls_and_reasoning_are_written() -> None:
    thinking = "{{ messages[0].content.split('</think>')[-1] }}"
    for source, style in [
        (HERMES, ("hermes", "")),
        (CONTENT_FIRST, ("mistral", "")),
        (CONCATENATED, ("", "deepseek_r1")),
        (HERMES + thinking, ("hermes", "qwen3")),
        (HERMES + "{# <function=name> #}", ("qwen3_coder", "")),
        ("{{ '<|python_tag|>' }}", ("llama3_json", "")),
        ("{{ '</think>' }}{{ raise_exception('no') }}", ("", "qwen3")),
    ]:
        assert style_of(ChatTemplate(source, {}))[:2] == style, source


@pytest.mark.parametrize(
    ("name", "marks"), [(name, marks) for name, record in TOOL_CALL_FORMATS.items() for marks in record.in_template]
)
def test_the_marks_of_each_format_select_it(name: str, marks: tuple[str, ...]) -> None:
    template = ChatTemplate(f"{{% raw %}}{''.join(marks)}{{% endraw %}}", {})
    assert style_of(template).tool_call_parser == name


@pytest.mark.parametrize("name", [name for name in REASONING_FORMATS if name != "deepseek_r1"])
def test_the_marks_of_each_kind_of_reasoning_select_it(name: str) -> None:
    record = REASONING_FORMATS[name]
    text = f"{record.start}{record.end}{''.join(record.answer_marks)}"
    assert style_of(ChatTemplate(f"{{% raw %}}{text}{{% endraw %}}.", {})).reasoning_parser == name


# Response templates in the form of transformers 5.23, and response schemas in the older form.
FIELDS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "literals": (
        {"fields": {"thinking": {"open": "<think>", "close": "</think>"}, "tool_calls": {"open": "<tool_call>"}}},
        ("hermes", "qwen3"),
    ),
    "patterns": (
        {"fields": {"tool_calls": {"open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>"}}},
        ("qwen3_coder", ""),
    ),
    "escapes": (
        {"fields": {"tool_calls": {"open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+)"}}},
        ("openai", ""),
    ),
    "content": (
        {"fields": {"thinking": {"close": "</think>"}, "content": {"open": ["<response>\n"]}, "tool_calls": {}}},
        ("", "ernie45"),
    ),
    "schema": (
        {
            "x-regex": r"(\<\|channel\>thought\n(?P<thinking>.*?)\<channel\|\>)?(?P<tool_calls>.*)",
            "properties": {"thinking": {}, "tool_calls": {"x-regex-iterator": r"<\|tool_call>(.*?)<tool_call\|>"}},
        },
        ("gemma4", "gemma4"),
    ),
    "unknown": ({"fields": {"tool_calls": {"open": "<|content_invoke_tool_json|>"}, "thinking": {}}}, ("", "")),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_response_template_precedes_the_chat_template(name: str) -> None:
    response, (calls, reasoning) = FIELDS[name]
    template = ChatTemplate("{% raw %}[TOOL_CALLS][THINK][/THINK]{% endraw %}.", {})
    style = style_of(template, response)
    assert style[:2] == (calls or "mistral", reasoning or "mistral")
    assert style.tool_call_source == ("response_template" if calls else "chat_template")
    assert style_of(None, response)[:2] == (calls, reasoning)


def test_the_vocabulary_shows_calls_if_no_template_does() -> None:
    tokens = ["<|im_end|>", "<think>", "</think>", "<tool_call>"]
    plain = ChatTemplate("{{ messages[0].content }}", {})
    assert style_of(plain, None, tokens) == style_of(None, {}, tokens) == ChatStyle("hermes", "", "vocabulary")
    assert style_of(ChatTemplate("[TOOL_CALLS]", {}), {}, tokens) == ChatStyle("mistral", "", "chat_template")
    assert style_of(plain, None, ["<arg_key>", "<tool_call>"]).tool_call_parser == "glm45"
    for wrong in ("text", ["fields"], {"fields": ["tool_calls"]}, {"fields": {"tool_calls": 1, "thinking": None}}):
        assert style_of(plain, cast(Any, wrong)) == ChatStyle()


@pytest.mark.parametrize("key", ["response_template", "response_schema"])
def test_a_folder_has_its_sources_in_the_files_of_the_tokenizer(tmp_path: Path, demo_model: Path, key: str) -> None:
    config = {"chat_template": "[TOOL_CALLS]", key: {"fields": {"tool_calls": {"open": "<|START_ACTION|>"}}}}
    shutil.copy(demo_model / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert TextCodec.load(tmp_path).chat_style == ChatStyle("cohere", "", "response_template")


# As DeepSeek-V3.1 has it: the reply begins with an open or a closed pair of marks.
SWITCHED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "[assistant]{{ '<think>' if thinking else '</think>' }}"
)
# As Qwen3 has it: an empty pair stands for no thinking, and otherwise the model writes both marks.
EMPTY_PAIR = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "[assistant]\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
# As SmolLM3 has it: a message switches it.
BY_MESSAGE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "[assistant]{{ '<think>\n\n</think>\n' if '/no_think' in messages[-1].content else '<think>\n' }}"
)
# Without a mark for no thinking.
WITHOUT_MARK = BY_MESSAGE.replace("'<think>\n\n</think>\n'", "''")
CONTINUED = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '' if '</think>' }}"


@pytest.mark.parametrize(
    ("source", "messages", "kwargs", "expected"),
    [
        (SWITCHED, ["hi"], {"thinking": True}, True),
        (SWITCHED, ["hi"], {}, False),
        (EMPTY_PAIR, ["hi"], {"enable_thinking": False}, False),
        (EMPTY_PAIR, ["hi"], {}, None),
        (BY_MESSAGE, ["hi"], {}, True),
        (BY_MESSAGE, ["hi /no_think"], {}, False),
        (WITHOUT_MARK, ["hi /no_think"], {}, False),
        # A user asks about the marks.
        (EMPTY_PAIR, ["what is <think>"], {}, None),
        (SWITCHED, ["what is <think>"], {}, False),
        (BY_MESSAGE, ["what is <think> and </think>"], {}, True),
        # The output continues with a message.
        (CONTINUED, ["hi", "<think>Four and"], {}, True),
        (CONTINUED, ["hi", "<think>Four</think>S"], {}, False),
        (CONTINUED, ["hi", "S"], {}, None),
        # No one knows of marks.
        ("{{ messages[0].content }}<think>", ["hi"], {}, None),
    ],
)
def test_the_rendered_prompt_determines_whether_an_answer_begins_in_thinking(
    demo_model: Path, source: str, messages: list[str], kwargs: dict[str, Any], expected: bool | None
) -> None:
    codec = TextCodec(Tokenizer.from_file(str(demo_model / "tokenizer.json")), ChatTemplate(source, {}))
    chat = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(messages)]
    assert codec.ends_in_reasoning(codec.encode_chat(chat, kwargs), chat) is expected


@pytest.mark.parametrize(
    ("source", "uses_tools"),
    [
        (HERMES, True),
        ("{%- if not tools is defined %}{% set tools = none %}{% endif %}{{ messages[0].content }}{{ tools }}", True),
        ("{% macro listed() %}{{ tools | tojson }}{% endmacro %}{{ messages[0].content }}{{ listed() }}", True),
        ("You have no tools. {{ messages[0].content }}", False),
    ],
)
def test_whether_a_template_uses_tools(source: str, uses_tools: bool) -> None:
    assert ChatTemplate(source, {}).uses_tools is uses_tools


def test_the_template_for_tools_decides() -> None:
    plain = "{{ messages[0].content }}"
    assert ChatTemplate(plain, {}, tool_use_source=HERMES).uses_tools
    assert not ChatTemplate(HERMES, {}, tool_use_source=plain).uses_tools
