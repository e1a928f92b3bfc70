"""Structured output through the whole stack, with the demo model."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest

from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams
from penstock.shared.errors import ValidationError
from penstock.shared.params.structured import StructuredOutputsParams

from ..following import beats

pytestmark = pytest.mark.xdist_group("deployment")

COUNT = "count from four to nine:"
WORD = {"type": "string", "pattern": "^[a-z]{1,12}$"}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"from": WORD, "to": WORD}, "required": ["from", "to"]},
    {"type": "array", "items": WORD, "minItems": 2, "maxItems": 3},
    {"type": "object", "properties": {"n": {"type": "integer", "minimum": 4, "maximum": 9}, "ok": {"type": "boolean"}}},
    {"anyOf": [{"type": "array", "items": {"enum": [1, 2]}, "maxItems": 4}, {"const": "none"}]},
    {
        "$ref": "#/$defs/step",
        "$defs": {
            "step": {
                "type": "object",
                "properties": {"say": WORD, "then": {"anyOf": [{"$ref": "#/$defs/step"}, {"type": "null"}]}},
                "required": ["say", "then"],
            }
        },
    },
]


def constrained(seed: int = 0, **grammar: Any) -> SamplingParams:
    structured = StructuredOutputsParams(**grammar)
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=300, structured_outputs=structured)


async def test_json_validates_in_a_crowd_of_every_kind(client: Client) -> None:
    cases = [(schema, seed) for schema in SCHEMAS for seed in range(3)]
    answers = [client.generate(COUNT, constrained(seed, json=s, disable_any_whitespace=True)) for s, seed in cases]
    plain = [client.generate(COUNT, SamplingParams(temperature=0.0, max_tokens=64)) for _ in range(3)]
    regexes = [client.generate(COUNT, constrained(seed, regex=r"(four|five) \d{2}!")) for seed in range(3)]
    choices = [client.generate(COUNT, constrained(seed, choice=["even", "odd"])) for seed in range(3)]
    outputs = await asyncio.gather(*answers, *plain, *regexes, *choices)
    texts = [output.text for output in outputs]
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    for (schema, _), text in zip(cases, texts, strict=False):
        jsonschema.validate(json.loads(text), schema)
    rest = texts[len(cases) :]
    assert rest[:3] == [" four five six seven eight nine."] * 3
    assert all(re.fullmatch(r"(four|five) \d{2}!", text) for text in rest[3:6])
    assert set(rest[6:]) <= {"even", "odd"}


async def test_a_stream_of_json_is_json(client: Client) -> None:
    params = constrained(json=SCHEMAS[0], disable_any_whitespace=True)
    deltas = [delta async for delta in client.stream(COUNT, params)]
    jsonschema.validate(json.loads("".join(delta.text for delta in deltas)), SCHEMAS[0])


async def test_an_invalid_grammar_is_a_validation_error(client: Client) -> None:
    with pytest.raises(ValidationError, match=r"structured_outputs.regex is refused by xgrammar: .*parenthesis"):
        await client.generate(COUNT, constrained(regex="(a"))
    with pytest.raises(ValidationError, match="uniqueItems"):
        await client.generate(COUNT, constrained(json={"type": "array", "uniqueItems": True}))
    with pytest.raises(ValidationError, match="exactly one"):
        StructuredOutputsParams(regex="a", choice=["a"])


async def test_a_slow_grammar_does_not_delay_others(deployment: LocalStack, client: Client) -> None:
    kinds = [{"type": "string", "pattern": "^[a-z]{1,90}$"}, {"type": "number"}, {"type": "array", "items": WORD}]
    huge = {"type": "object", "properties": {f"field {i}": {"anyOf": kinds} for i in range(300)}}
    before = await beats(deployment.url)
    slow = asyncio.create_task(client.generate(COUNT, constrained(json=huge)))
    num_answers = 0
    while not slow.done():
        output = await client.generate(COUNT, constrained(seed=num_answers, choice=["even", "odd"]))
        assert output.text in ("even", "odd")
        num_answers += 1
    assert num_answers >= 1
    assert (await slow).text.startswith("{")
    after = await beats(deployment.url)
    assert {name: beat.core_pid for name, beat in after.items()} == {
        name: beat.core_pid for name, beat in before.items()
    }
