from __future__ import annotations

from typing import Any

import pytest

from penstock.producer.openai.json_schema import check_schema, embeddable, structured_outputs_of
from penstock.producer.openai.tools.definitions import (
    Function,
    ToolChoice,
    allowed_functions,
    read_tool_choice,
    read_tools,
)
from penstock.producer.openai.tools.forcing import NativeCalls, forced_json, native_calls
from penstock.producer.openai.tools.formats import TOOL_CALL_PARSERS, find_tool_call_style
from penstock.shared.errors import ValidationError
from penstock.shared.params.answer_formats import TOOL_CALL_FORMATS

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def custom(**form: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "patch", "format": form}}


def hermes(functions: list[Function]) -> NativeCalls:
    native = native_calls(TOOL_CALL_FORMATS["hermes"].calls, functions, is_parallel=True)
    assert native is not None
    return native


def test_a_tool_reaches_the_template_as_transformers_gives_it() -> None:
    strict, plain = read_tools([tool(parameters=CITY, description="Tells.", strict=True), tool("now")])
    assert strict.for_template == tool(description="Tells.", parameters=CITY)
    assert list(strict.for_template["function"]) == ["name", "description", "parameters"]
    assert plain.for_template == tool("now", parameters={"type": "object", "properties": {}})
    assert (strict.strict, plain.strict) == (True, False)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("weather", "tools must be a list"),
        ([1], r"tools\[0\] must be an object"),
        ([{"type": "web_search"}], r"tools\[0\]\.type must be 'function' or 'custom'"),
        ([{"type": "custom"}], r"tools\[0\]\.custom must be an object"),
        ([custom(type="xml")], r"tools\[0\]\.custom\.format\.type must be 'text' or 'grammar'"),
        ([custom(type="grammar", grammar={"syntax": "ebnf"})], r"custom\.format\.syntax must be 'lark' or 'regex'"),
        ([custom(type="grammar", grammar={"syntax": "lark"})], r"custom\.format\.definition must be given"),
        ([{"type": "function", "function": 1}], r"tools\[0\]\.function must be an object"),
        ([tool("a b")], r"tools\[0\]\.function\.name must be 1 to 128"),
        ([tool(), tool()], r"tools\[1\]\.function\.name must be unique"),
        ([tool(description=1)], r"tools\[0\]\.function\.description must be a string"),
        ([tool(strict="yes")], r"tools\[0\]\.function\.strict must be true or false"),
        ([tool(parameters=[])], r"tools\[0\]\.function\.parameters must be a JSON schema"),
        ([tool(parameters={"type": "array"})], r"tools\[0\]\.function\.parameters\.type must be 'object'"),
        ([tool(parameters={"properties": {"a": 1}})], r"parameters\.properties\.a must be a JSON schema"),
    ],
)
def test_an_invalid_tool_is_named(tools: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        read_tools(tools)


def test_the_choice_of_a_tool() -> None:
    functions = read_tools([tool(), tool("now")])
    assert read_tool_choice(None, functions) == ToolChoice("auto")
    assert read_tool_choice(None, []) == read_tool_choice("auto", []) == ToolChoice("none")
    assert read_tool_choice("required", functions) == ToolChoice("required")
    assert read_tool_choice(tool("now"), functions) == ToolChoice("required", "now")
    assert read_tool_choice("any", functions) == ToolChoice("required")
    for choice, message in [
        ("some", "tool_choice must be 'none', 'auto', 'required' or"),
        ({"type": "web"}, "tool_choice must be"),
        (tool("then"), r"tool_choice\.function\.name must be one of the tools \(weather, now\), got 'then'"),
    ]:
        with pytest.raises(ValidationError, match=message):
            read_tool_choice(choice, functions)
    with pytest.raises(ValidationError, match="tools is empty"):
        read_tool_choice("required", [])


def test_allowed_tools_are_those_that_are_left() -> None:
    functions = read_tools([tool(), tool("now")])

    def allowing(*tools: Any, mode: str = "required") -> dict[str, Any]:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}

    assert allowed_functions("auto", functions) == (functions, "auto")
    assert allowed_functions(allowing(tool("now")), functions) == (functions[1:], "required")
    for choice, message in [
        (allowing(tool(), mode="none"), r"tool_choice\.allowed_tools\.mode must be"),
        (allowing("auto"), r"tool_choice\.allowed_tools\.tools must be a list"),
        (allowing(), r"tool_choice\.allowed_tools\.tools must be a list"),
        (allowing(tool("then")), r"tool_choice\.allowed_tools\.tools\[0\]\.function\.name must be one of the tools"),
    ]:
        with pytest.raises(ValidationError, match=message):
            allowed_functions(choice, functions)


def test_forced_calls_are_arguments_or_a_list() -> None:
    functions = read_tools([tool(parameters=CITY), tool("now")])
    named = forced_json(functions, ToolChoice("required", "weather"), is_parallel=True)
    assert named.json == CITY
    schema: Any = forced_json(functions, ToolChoice("required"), is_parallel=False).json
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert [call["properties"]["name"] for call in schema["items"]["anyOf"]] == [{"const": "weather"}, {"const": "now"}]


def test_references_still_point_to_their_definitions_inside_of_another_schema() -> None:
    tree = {
        "type": "object",
        "properties": {"left": {"$ref": "#"}, "value": {"$ref": "#/$defs/value"}, "const": {"$ref": "#"}},
        "default": {"$ref": "#"},
        "$defs": {"value": {"type": "integer"}},
    }
    assert embeddable(CITY, "a") == (CITY, {})
    inside, definitions = embeddable(tree, "tree")
    assert inside == {"$ref": "#/$defs/tree"}
    moved = definitions["tree"]["properties"]
    assert moved["left"] == {"$ref": "#/$defs/tree"}
    assert moved["value"] == {"$ref": "#/$defs/tree/$defs/value"}
    assert moved["const"] == {"$ref": "#/$defs/tree"}
    assert definitions["tree"]["default"] == {"$ref": "#"}
    check_schema({"anyOf": [inside], "$defs": definitions}, "schema")


def test_calls_of_strict_functions_follow_their_schemas_in_free_text() -> None:
    assert hermes(read_tools([tool()])).optional() is None
    constraint = hermes(read_tools([tool(parameters=CITY, strict=True), tool("now")])).optional()
    assert constraint is not None
    assert constraint.structural_tag is not None
    assert '"name\\": \\"weather\\", \\"arguments\\": ' in constraint.structural_tag


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (None, "schema must be a JSON schema"),
        ({"type": "text"}, r"schema\.type must be one or more of"),
        ({"type": []}, r"schema\.type must be"),
        ({"properties": []}, r"schema\.properties must be an object"),
        ({"required": "a"}, r"schema\.required must be a list of names"),
        ({"items": {"enum": []}}, r"schema\.items\.enum must have at least one"),
        ({"anyOf": []}, r"schema\.anyOf must have at least one"),
        ({"anyOf": [True, 1]}, r"schema\.anyOf\[1\] must be a JSON schema"),
        ({"$ref": "#/$defs/a"}, r"schema\.\$ref must point to a schema in the same document"),
        ({"$ref": "other.json"}, r"schema\.\$ref must point"),
    ],
)
def test_an_invalid_schema_is_named(schema: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        check_schema(schema, "schema")


def test_a_schema_may_not_nest_without_end() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100):
        schema = {"unknown": schema}
    with pytest.raises(ValidationError, match="schema must be nested at most 64 deep"):
        check_schema(schema, "schema")


def test_response_formats() -> None:
    assert structured_outputs_of(None) is None
    assert structured_outputs_of({"type": "text"}) is None
    any_object = structured_outputs_of({"type": "json_object"})
    assert any_object is not None
    assert any_object.json_object
    described = {"name": "city", "schema": CITY, "strict": True}
    constraint = structured_outputs_of({"type": "json_schema", "json_schema": described})
    assert constraint is not None
    assert (constraint.json, constraint.disable_additional_properties) == (CITY, True)


@pytest.mark.parametrize(
    ("response_format", "message"),
    [
        ("json", "response_format must be an object"),
        ({"type": "xml"}, r"response_format\.type must be"),
        ({"type": "json_schema"}, r"response_format\.json_schema must be an object"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, r"response_format\.json_schema\.name must be"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, r"response_format\.json_schema\.schema must be"),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "text"}}},
            r"response_format\.json_schema\.schema\.type must be",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": 1}},
            r"response_format\.json_schema\.strict must be",
        ),
    ],
)
def test_an_invalid_response_format_is_named(response_format: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        structured_outputs_of(response_format)


def test_ids_of_calls_are_the_same_at_every_reading_and_fit_the_templates() -> None:
    hermes, mistral = TOOL_CALL_PARSERS["hermes"], TOOL_CALL_PARSERS["mistral"]
    assert hermes.call_id("r", 0, 1) == hermes.call_id("r", 0, 1) != hermes.call_id("r", 1, 0)
    assert mistral.call_id("r", 0, 0).isalnum()
    assert len(mistral.call_id("r", 0, 0)) == 9
    with pytest.raises(ValidationError, match=r"tool_call_parser must be one of .*hermes, .*, got 'x'"):
        find_tool_call_style("x")


def test_a_json_object_may_have_a_schema() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    grammar = structured_outputs_of({"type": "json_object", "schema": schema})
    assert grammar is not None
    assert (grammar.json, grammar.json_object) == (schema, None)
    with pytest.raises(ValidationError, match=r"response_format\.schema\.type must be one or more of"):
        structured_outputs_of({"type": "json_object", "schema": {"type": "text"}})
