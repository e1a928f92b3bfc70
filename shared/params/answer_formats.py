"""Formats in which families of models write tool calls and reasoning, as data.

The worker selects the formats of a model by their marks and names them in its card; the gateway reads answers by
them. Names are those of vLLM's parsers where it has one.

Whitespace at either end of a literal, and around its line breaks, is written when a call is forced and optional when a
call is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HERMES = "hermes"
CHANNELS = "openai"
OPENED_BY_PROMPT = "deepseek_r1"


@dataclass(frozen=True)
class JsonArguments:
    """Arguments as a JSON object."""

    style: str = "json"


@dataclass(frozen=True)
class ElementArguments:
    """Arguments as one element per parameter.

    Args:
        key: literals before and after the name of the parameter.
        value: literals before and after its value.
        has_line_breaks: whether a line break next to either literal is not part of the value.
        kind: literals around an attribute that follows the name; None without one.
        string_kind: the attribute of a value that is text. Other values are JSON.
        style: xgrammar's name of the form; empty if it has none.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    has_line_breaks: bool = False
    kind: tuple[str, str] | None = None
    string_kind: str = ""
    style: str = ""


@dataclass(frozen=True)
class TreeArguments:
    """Arguments as elements that are named like the parameters and may be nested. Those of a list are named "item".

    Args:
        prefix: precedes each tag.
    """

    prefix: str
    style: str = ""


@dataclass(frozen=True)
class BareKeyArguments:
    """Arguments as an object without quotes around its keys.

    Args:
        quote: precedes and follows a string, which has no escapes.
    """

    quote: str
    style: str = ""


Arguments = JsonArguments | ElementArguments | TreeArguments | BareKeyArguments


@dataclass(frozen=True)
class FramedCalls:
    """Calls as a name and arguments between literals.

    Args:
        call: literal before the name. If the line breaks divide it into several, those before the last may be missing.
        name_end: literal between name and arguments.
        arguments: form of the arguments.
        call_end: literal after the arguments. The end of the text may truncate it.
        sections: literals before the first call and after the last, of which the first pair is the usual one; empty
            without any.
        counter: literals around a number between the name and ``name_end``; None without one.
        name_prefix: removed from the name, which together with a colon and a number is the id of the call.
        separator: literal between two calls.
    """

    call: str
    name_end: str
    arguments: Arguments
    call_end: str
    sections: tuple[tuple[str, str], ...] = ()
    counter: tuple[str, str] | None = None
    name_prefix: str = ""
    separator: str = ""


@dataclass(frozen=True)
class ObjectCalls:
    """Calls as JSON objects, one or a list of them.

    Args:
        opens: literals before the calls, of which the first is the usual one.
        close: literal after the calls; models may omit it.
        bare: an answer that starts with this character consists of calls; empty if ``opens`` must precede them.
        is_list: whether the usual form is a list.
        separator: between objects that are not in a list; empty if each has its own ``opens``.
        names, arguments: keys of an object. Without ``names`` the only key of an object is the name of the function,
            and its value the arguments.
    """

    opens: tuple[str, ...] = ()
    close: str = ""
    bare: str = ""
    is_list: bool = True
    separator: str = ""
    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")


@dataclass(frozen=True)
class PythonCalls:
    """Calls as Python's calls with keyword arguments, in a list or one per line.

    Args:
        opens: literals before the calls.
        bare: an answer that starts with this character consists of calls; empty if ``opens`` must precede them.
    """

    opens: tuple[str, ...] = ()
    close: str = ""
    bare: str = ""


@dataclass(frozen=True)
class MistralCalls:
    """A marker, and behind it a JSON list of objects or, since version 11 of the tokenizer, a name and arguments."""

    opens: tuple[str, ...] = ("[TOOL_CALLS]",)


@dataclass(frozen=True)
class ChannelCalls:
    """OpenAI's harmony format: messages in channels. It contains the reasoning as well."""


Calls = FramedCalls | ObjectCalls | PythonCalls | MistralCalls | ChannelCalls


@dataclass(frozen=True)
class ToolCallFormat:
    """Format of tool calls of a family of models.

    Args:
        in_template: alternatives, each a set of texts that are all in a template that shows this format.
        id_prefix, num_id_chars: form of the ids of calls. Mistral's templates accept only ids of nine characters.
    """

    calls: Calls
    in_template: tuple[tuple[str, ...], ...] = ()
    id_prefix: str = "call_"
    num_id_chars: int = 24


@dataclass(frozen=True)
class ReasoningFormat:
    """Marks around the reasoning of a family of models.

    Args:
        starts_in_prompt: the chat template puts ``start`` at the end of the prompt, so the text begins inside the
            reasoning. Some models repeat the mark anyway.
        answer_marks: literals around the answer that follows; they are removed.
        in_template: texts that are all in a chat template that shows this format; only ``end`` if empty.
    """

    start: str
    end: str
    starts_in_prompt: bool = False
    answer_marks: tuple[str, ...] = ()
    in_template: tuple[str, ...] = ()


def _dsml(tool_calls: Sequence[str], *, blank: str = "", style: str) -> FramedCalls:
    tag, end = f"<｜DSML｜{blank}", f"</｜DSML｜{blank}"
    return FramedCalls(
        sections=tuple((f"{tag}{name}>\n", f"{end}{name}>") for name in tool_calls),
        call=f'{tag}invoke name="',
        name_end='">\n',
        arguments=ElementArguments(
            key=(f'{tag}parameter name="', '"'),
            kind=(' string="', '"'),
            string_kind="true",
            value=(">", f"{end}parameter>"),
            style=style,
        ),
        call_end=f"{end}invoke>\n",
    )


_QWEN_ELEMENTS = ElementArguments(
    key=("<parameter=", ">"), value=("", "</parameter>"), has_line_breaks=True, style="qwen_xml"
)
_GLM_ELEMENTS = ElementArguments(
    key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>"), style="glm_xml"
)
_M3 = "]<]minimax[>["

# Formats with marks that others share come behind the others: the first whose texts are in the template is selected.
TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = {
    CHANNELS: ToolCallFormat(ChannelCalls(), (("<|channel|>", "<|constrain|>"), ("<|channel|>", "to=functions"))),
    "kimi_k3": ToolCallFormat(
        FramedCalls(
            sections=(("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),),
            call='<|open|>call tool="',
            counter=('" index="', '"'),
            name_end="<|sep|>",
            arguments=ElementArguments(
                key=('<|open|>argument key="', '"'),
                kind=(' type="', '"'),
                string_kind="string",
                value=("<|sep|>", "<|close|>argument<|sep|>"),
                style="kimi_k3_xml",
            ),
            call_end="<|close|>call<|sep|>",
        ),
        (("<|open|>", "<|sep|>"),),
    ),
    "kimi_k2": ToolCallFormat(
        FramedCalls(
            sections=(("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
            call="<|tool_call_begin|>",
            name_prefix="functions.",
            counter=(":", ""),
            name_end="<|tool_call_argument_begin|>",
            arguments=JsonArguments(),
            call_end="<|tool_call_end|>",
        ),
        (("<|tool_calls_section_begin|>",),),
    ),
    "deepseek_v41": ToolCallFormat(
        _dsml(["calls"], blank=" ", style="deepseek_v4_1_xml"), (("｜DSML｜ calls",), ("｜DSML｜ invoke",))
    ),
    "deepseek_v4": ToolCallFormat(
        _dsml(["tool_calls", "toolcalls", "tool"], style="deepseek_xml"), (("｜DSML｜tool_calls",),)
    ),
    "deepseek_v32": ToolCallFormat(_dsml(["function_calls"], style="deepseek_xml"), (("｜DSML｜",),)),
    "deepseek_v3": ToolCallFormat(
        FramedCalls(
            sections=(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),),
            call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            name_end="\n```json\n",
            arguments=JsonArguments(),
            call_end="\n```<｜tool▁call▁end｜>",
            separator="\n",
        ),
        (("<｜tool▁call▁begin｜>", "```json"),),
    ),
    "deepseek_v31": ToolCallFormat(
        FramedCalls(
            sections=(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),),
            call="<｜tool▁call▁begin｜>",
            name_end="<｜tool▁sep｜>",
            arguments=JsonArguments(),
            call_end="<｜tool▁call▁end｜>",
        ),
        (("<｜tool▁call▁begin｜>",),),
    ),
    "minimax_m3": ToolCallFormat(
        FramedCalls(
            sections=((f"{_M3}<tool_call>\n", f"{_M3}</tool_call>"),),
            call=f'{_M3}<invoke name="',
            name_end='">',
            arguments=TreeArguments(_M3, style="minimax_m3_xml"),
            call_end=f"{_M3}</invoke>\n",
        ),
        ((_M3,),),
    ),
    "minimax_m2": ToolCallFormat(
        FramedCalls(
            sections=(("<minimax:tool_call>\n", "</minimax:tool_call>"),),
            call='<invoke name="',
            name_end='">\n',
            arguments=ElementArguments(
                key=('<parameter name="', '">'), value=("", "</parameter>"), style="minimax_xml"
            ),
            call_end="</invoke>\n",
        ),
        (("<minimax:tool_call>",),),
    ),
    "seed_oss": ToolCallFormat(
        FramedCalls(
            call="<seed:tool_call>\n<function=",
            name_end=">\n",
            arguments=_QWEN_ELEMENTS,
            call_end="\n</function>\n</seed:tool_call>",
            separator="\n",
        ),
        (("<seed:tool_call>",),),
    ),
    "qwen3_coder": ToolCallFormat(
        FramedCalls(
            call="<tool_call>\n<function=",
            name_end=">\n",
            arguments=_QWEN_ELEMENTS,
            call_end="\n</function>\n</tool_call>",
            separator="\n",
        ),
        (("<tool_call>", "<function="),),
    ),
    "hy_v3": ToolCallFormat(
        FramedCalls(
            sections=(("<tool_calls>\n", "\n</tool_calls>"),),
            call="<tool_call>",
            name_end="<tool_sep>\n",
            arguments=_GLM_ELEMENTS,
            call_end="\n</tool_call>",
            separator="\n",
        ),
        (("<tool_sep>",),),
    ),
    "glm45": ToolCallFormat(
        FramedCalls(
            call="<tool_call>",
            name_end="\n",
            arguments=_GLM_ELEMENTS,
            call_end="</tool_call>",
            separator="\n",
        ),
        (("<arg_key>",),),
    ),
    "gemma4": ToolCallFormat(
        FramedCalls(
            call="<|tool_call>call:", name_end="", arguments=BareKeyArguments('<|"|>'), call_end="<tool_call|>"
        ),
        (("<|tool_call>",),),
    ),
    "functiongemma": ToolCallFormat(
        FramedCalls(
            call="<start_function_call>call:",
            name_end="",
            arguments=BareKeyArguments("<escape>"),
            call_end="<end_function_call>",
        ),
        (("<start_function_call>",),),
    ),
    "cohere": ToolCallFormat(
        ObjectCalls(
            opens=("<|START_ACTION|>",),
            close="<|END_ACTION|>",
            names=("tool_name", "name"),
            arguments=("parameters", "arguments"),
        ),
        (("<|START_ACTION|>",),),
    ),
    "apertus": ToolCallFormat(
        ObjectCalls(opens=("<|tools_prefix|>",), close="<|tools_suffix|>", names=()), (("<|tools_prefix|>",),)
    ),
    "granite": ToolCallFormat(ObjectCalls(opens=("<|tool_call|>", "<tool_call>")), (("<|tool_call|>",),)),
    "hunyuan_a13b": ToolCallFormat(ObjectCalls(opens=("<tool_calls>",), close="</tool_calls>"), (("<tool_calls>",),)),
    "phi4_mini_json": ToolCallFormat(ObjectCalls(opens=("functools",)), (("functools",), ("<|tool|>", "<|/tool|>"))),
    "olmo3": ToolCallFormat(
        PythonCalls(opens=("<function_calls>",), close="</function_calls>"), (("<function_calls>",),)
    ),
    "lfm2": ToolCallFormat(
        PythonCalls(opens=("<|tool_call_start|>",), close="<|tool_call_end|>"),
        (("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    ),
    "llama4_pythonic": ToolCallFormat(
        PythonCalls(opens=("<|python_start|>",), close="<|python_end|>", bare="["), (("<|python_start|>",),)
    ),
    "pythonic": ToolCallFormat(PythonCalls(bare="[")),
    "mistral": ToolCallFormat(MistralCalls(), (("[TOOL_CALLS]",),), id_prefix="", num_id_chars=9),
    "xlam": ToolCallFormat(ObjectCalls(opens=("```json", "[TOOL_CALLS]", "<tool_call>"), close="```", bare="[")),
    HERMES: ToolCallFormat(
        ObjectCalls(opens=("<tool_call>\n",), close="\n</tool_call>", is_list=False), (("<tool_call>",),)
    ),
    "llama3_json": ToolCallFormat(
        ObjectCalls(
            opens=("<|python_tag|>",), bare="{", is_list=False, separator=";", arguments=("parameters", "arguments")
        ),
        (("<|python_tag|>",), ('"parameters": dictionary of argument name',)),
    ),
}


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "openai_gptoss": ReasoningFormat(
        "<|channel|>analysis<|message|>", "<|end|>", in_template=("<|channel|>", "<|message|>")
    ),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "hunyuan_a13b": ReasoningFormat(
        "<think>",
        "</think>",
        answer_marks=("<answer>\n", "<answer>", "\n</answer>", "</answer>"),
        in_template=("</think>", "<answer>"),
    ),
    "ernie45": ReasoningFormat(
        "<think>",
        "</think>",
        starts_in_prompt=True,
        answer_marks=("<response>\n", "<response>", "\n</response>", "</response>"),
        in_template=("</think>", "<response>"),
    ),
    "cohere": ReasoningFormat(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        answer_marks=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"),
    "kimi_k3": ReasoningFormat(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        starts_in_prompt=True,
        answer_marks=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        in_template=("<|open|>", "<|sep|>"),
    ),
    "minimax_m3": ReasoningFormat("<mm:think>", "</mm:think>"),
    "apertus": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    # qwen3 whose chat template writes the first mark at the end of the prompt.
    OPENED_BY_PROMPT: ReasoningFormat("<think>", "</think>", starts_in_prompt=True),
}


def tool_call_format_of(text: str) -> str:
    """Return the name of the format of tool calls whose marks ``text`` has; empty if it has none."""
    for name, record in TOOL_CALL_FORMATS.items():
        if any(all(mark in text for mark in marks) for marks in record.in_template):
            return name
    return ""


def reasoning_format_of(text: str) -> str:
    """Return the name of the format of reasoning whose marks ``text`` has; empty if it has none."""
    for name, record in REASONING_FORMATS.items():
        if all(mark in text for mark in record.in_template or (record.end,)):
            return name
    return ""
