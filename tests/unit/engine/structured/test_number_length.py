"""Numbers and whitespace in JSON answers are of limited length: readers take each number for a finite one, and a model
that writes newlines comes to an end.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest

from penstock.shared.params.sampling import SamplingParams
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.engine.scheduling.request import Request
from penstock.worker.engine.structured.admission import GrammarAdmission
from penstock.worker.engine.structured.constraint import FAILED, GrammarConstraint, new_bitmask
from penstock.worker.engine.structured.grammar import Backend
from penstock.worker.engine.structured.schemas.number_rules import limit_numbers
from penstock.worker.engine.structured.spec import MAX_WHITESPACE, GrammarSpec, spec_of

from .walking import EOS, TOKENS, VOCABULARY, load

ENDING = frozenset([EOS])
LONGEST = f"-{'1' * 200}.{'2' * 300}E-99"
INTEGERS = ("0", "-7", "12345678901234567890", "1" * 200)
SHORT = (*INTEGERS, "-0.5", "1e5", "1E+09", "1.25e-07", LONGEST)
LONG = ("36E+873", "1e400", "1e-999", "-2.5E000", "3" * 201, "1" * 300, f"1.{'2' * 401}")
LEGACY_TAG = {
    "structures": [{"begin": "<n>", "schema": {"type": "number"}, "end": "</n>"}],
    "triggers": ["<n"],
}


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return load(request.param)


def accepted(backend: Backend, spec: GrammarSpec, texts: list[str]) -> list[str]:
    """The ``texts`` that may be the whole output."""
    compiled = backend.compile(spec)
    ids = {text: [*text.encode(), EOS] for text in texts}
    return [text for text in texts if compiled.start(ENDING).validate_tokens(ids[text]) == ids[text]]


def check(
    backend: Backend, form: str, short: tuple[str, ...] = SHORT, long: tuple[str, ...] = LONG, **grammar: Any
) -> None:
    spec = spec_of(StructuredOutputsParams(**grammar))
    expected, refused = [form % number for number in short], [form % number for number in long]
    assert accepted(backend, spec, expected + refused) == expected


@pytest.mark.parametrize(
    ("schema", "form"),
    [
        ({"type": "number"}, "%s"),
        ({}, "%s"),
        ({}, '{"a": [1, {"b": %s}]}'),
        ({"type": "array", "items": {"type": ["null", "number"]}}, "[null,1,%s]"),
        (
            {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "number"}}},
            '{"a":%s}',
        ),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "number"}}, '{"a":1,"b":%s}'),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "%s"),
    ],
)
def test_numbers(backend: Backend, schema: Any, form: str) -> None:
    check(backend, form, json=schema)


def test_any_object(backend: Backend) -> None:
    check(backend, '{"a":%s}', json_object=True)


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"type": "integer", "minimum": -7}])
def test_integers(backend: Backend, schema: Any) -> None:
    check(backend, "%s", INTEGERS, json=schema)
    check(backend, '{"a":%s}', INTEGERS, json={"type": "object", "properties": {"a": schema}})


@pytest.mark.parametrize(
    ("schema", "short"),
    [
        ({"type": "integer", "minimum": 1000}, ("1000", "1" * 200)),
        ({"type": "integer", "exclusiveMaximum": 5}, ("-1", "-" + "1" * 200)),
        ({"type": "number", "minimum": 0.5}, ("0.5", "1" * 200, "7.25")),
        ({"type": "number", "maximum": 5}, ("5", "-" + "1" * 200, "-7.25")),
        ({"type": "number", "minimum": -1, "maximum": 5}, ("5", "-0.25")),
        ({"type": "integer", "multipleOf": 7}, ("0", "-49", "7" * 16)),
        ({"type": "integer", "multipleOf": 1000}, ("0", "-12000", "1" * 12 + "000")),
        ({"type": "integer", "multipleOf": 997}, ("0", "-997000", "99700000997")),
    ],
)
def test_bounds_and_multiples(backend: Backend, schema: Any, short: tuple[str, ...]) -> None:
    long = ("1e2", "1e400", "1" * 201, "-" + "7" * 300, "-" + "1" * 201 + ".5", "1" * 200 + "000")
    check(backend, "%s", short, long, json=schema)


@pytest.mark.parametrize("multiple", [1, 3, 17, 360, 997, 1000, 1024])
def test_a_multiple_can_always_be_completed(backend: Backend, multiple: int) -> None:
    """Also by a model that writes digits as long as it may."""
    spec = spec_of(StructuredOutputsParams(json={"type": "integer", "multipleOf": multiple}))
    constraint = GrammarConstraint("", backend.compile(spec).start(ENDING), VOCABULARY.size, ENDING)
    bitmask, text = new_bitmask(1, VOCABULARY.size), ""
    may_end = False
    for index in itertools.count():
        assert constraint.fill(bitmask, 0), constraint.failure
        allowed = np.unpackbits(bitmask[0].view(np.uint8), bitorder="little", count=VOCABULARY.size)
        may_end = bool(allowed[EOS])
        digits = [token_id for token_id, token in enumerate(TOKENS) if allowed[token_id] and token.isdigit()]
        if not digits:
            break
        token_id = digits[(3 + 7 * index) % len(digits)]
        text += TOKENS[token_id].decode()
        assert constraint.accept(token_id) is None
    assert may_end
    assert (int(text) % multiple, 12 <= len(text) <= 200) == (0, True)


def test_strings_and_constants_are_as_long_as_ever(backend: Backend) -> None:
    digits = {"type": "string", "pattern": "^[0-9]*$"}
    schema = {"type": "object", "properties": {"a": digits, "n": {"type": "number"}, "b": digits}}
    check(backend, '{"a":"' + "1" * 500 + '","n":%s,"b":"' + "0" * 500 + '"}', json=schema)
    check(backend, '{"s":"1e999 %s","n":%%s}' % ("1" * 500), json={})
    tiny = {"xgrammar": "1e-300", "llguidance": f"0.{'0' * 299}1"}
    spec = spec_of(StructuredOutputsParams(json={"enum": [1e-300, "1e400"]}))
    texts = [tiny["xgrammar"], tiny["llguidance"], '"1e400"']
    assert len(accepted(backend, spec, texts)) == 2


def test_numbers_in_structural_tags(backend: Backend) -> None:
    check(backend, "so 1e400 <n>%s</n> and <n>1</n> 1e400", structural_tag=json.dumps(LEGACY_TAG))


def tag_of(content: Any, begin: Any = "<n>") -> str:
    return json.dumps(
        {"type": "structural_tag", "format": {"type": "tag", "begin": begin, "content": content, "end": "</n>"}}
    )


def test_numbers_in_structural_tags_of_the_newer_form() -> None:
    backend = load("xgrammar")
    number = {"type": "number"}
    a_and_b = {"type": "object", "properties": {"a": number, "b": {"type": "integer", "minimum": 3}}}
    check(backend, "<n>%s</n>", structural_tag=tag_of({"type": "json_schema", "json_schema": number}))
    # A token by its text is only known to a compiler.
    by_token = tag_of({"type": "json_schema", "json_schema": number}, {"type": "token", "token": "00"})
    compiled = backend.compile(spec_of(StructuredOutputsParams(structural_tag=by_token)))
    for text, is_accepted in (("1e5", True), ("1e400", False)):
        token_ids = [TOKENS.index(b"00"), *f"{text}</n>".encode(), EOS]
        assert (compiled.start(ENDING).validate_tokens(token_ids) == token_ids) == is_accepted
    for kind in ({"type": "json_schema", "style": "qwen_xml"}, {"type": "qwen_xml_parameter"}):
        in_xml = tag_of({**kind, "json_schema": a_and_b})
        form = "<n><parameter=a>%s</parameter><parameter=b>12</parameter></n>"
        check(backend, form, structural_tag=in_xml)
    # Other parts of a tag stay as they are.
    spec = spec_of(StructuredOutputsParams(structural_tag=tag_of({"type": "regex", "pattern": "[0-9]*"})))
    digits = f"<n>{'1' * 300}</n>"
    assert accepted(backend, spec, [digits, "<n>a</n>"]) == [digits]


def test_whitespace_is_as_before() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "number"}}}
    for pattern, blank in (("[ ]{2}", "  "), (r"(//[/\\]\n)?", "//\\\n"), (r"\/", "/")):
        check(load("llguidance"), f'{{{blank}"a"{blank}:{blank}%s}}', json=schema, whitespace_pattern=pattern)
    for name in ("xgrammar", "llguidance"):
        tight = '{"a": %s}' if name == "xgrammar" else '{"a":%s}'
        check(load(name), tight, json=schema, disable_any_whitespace=True)


ARRAY_IN_OBJECT = {"json": {"type": "object", "properties": {"a": {"type": "array"}}}}
TAG = {"structural_tag": json.dumps({**LEGACY_TAG, "structures": [{"begin": "<n>", "schema": {}, "end": "</n>"}]})}


@pytest.mark.parametrize(
    ("form", "grammar"),
    [
        ('{%s"a":[1,2]}', ARRAY_IN_OBJECT),
        ('{"a"%s:[1,2]}', ARRAY_IN_OBJECT),
        ('{"a":%s[1,2]}', ARRAY_IN_OBJECT),
        ('{"a":[1,%s2]}', ARRAY_IN_OBJECT),
        ('{"a":[1,2]%s}', ARRAY_IN_OBJECT),
        ("[1%s,2,3]", {"json": {}}),
        ("[1,2%s]", {"json": {}}),
        ('{"a":1,%s"b":2}', {"json_object": True}),
        ('so <n>{%s"a":1}</n>', TAG),
        ('so <n>{"a":1%s}</n> and <n>{}</n>', TAG),
    ],
)
def test_whitespace_in_json_has_a_limit(backend: Backend, form: str, grammar: dict[str, Any]) -> None:
    """A model that writes newlines for ever has to go on."""
    spec = spec_of(StructuredOutputsParams(**grammar))
    texts = [form % blank for blank in ("", "\n" + "\t " * 15, " " * MAX_WHITESPACE)]
    long = form % ("\n" * (MAX_WHITESPACE + 1))
    assert accepted(backend, spec, [*texts, long]) == texts
    # An engine of an older version may have begun it.
    assert accepted(backend, dataclasses.replace(spec, has_any_length=True), [*texts, long]) == [*texts, long]


def test_a_tags_own_limit_of_whitespace_is_kept() -> None:
    backend, form = load("xgrammar"), '<n>{"a":%s1}</n>'
    schema = {"type": "object", "properties": {"a": {"type": "number"}}}
    for own, longest in ((None, MAX_WHITESPACE), (1, 1), (40, 40)):
        content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": own}
        spec = spec_of(StructuredOutputsParams(structural_tag=tag_of(content)))
        texts = [form % (" " * count) for count in (0, longest, longest + 1)]
        assert accepted(backend, spec, texts) == texts[:2]


def test_it_goes_back_over_a_number(backend: Backend) -> None:
    grammar = backend.compile(spec_of(StructuredOutputsParams(json={"type": "number"}))).start(ENDING)
    assert grammar.accept_tokens([*b"1e99", EOS])
    grammar.rollback(3)
    assert grammar.validate_tokens([*b"123"]) == [*b"12"]
    assert not grammar.accept_tokens([*b"123"])
    grammar.reset()
    assert grammar.validate_tokens([*b"1E+9", EOS]) == [*b"1E+9", EOS]
    assert grammar.forced_tokens(9) == []


@pytest.mark.parametrize(
    "grammar", [{"json": {"type": "object", "properties": {"a": {}}}}, {"structural_tag": json.dumps(LEGACY_TAG)}]
)
def test_an_output_with_a_longer_number_is_resumed(backend: Backend, grammar: dict[str, Any]) -> None:
    """An engine of an older version has begun it."""
    text, rest = ('{"a":36E+873', "}") if "json" in grammar else ("<n>36E+873", "</n>.")
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**grammar), max_tokens=500)
    admission = GrammarAdmission(lambda: backend, vocab_size=VOCABULARY.size, eos_token_ids=[EOS])
    outputs = {"old": text.encode(), "again": text.encode(), "new": text[:-1].encode(), "wrong": b"<n>\x00"}
    results: dict[str, Any] = {}
    requests = {
        name: Request(name, [1], params, max_model_len=999, output_token_ids=list(output))
        for name, output in outputs.items()
    }
    for request in requests.values():
        admission.add(request)
    while len(results) < len(requests):
        admission.wait(0.1)
        results |= {request.request_id: error for request, error in admission.pop_ready()}
    wrong = results.pop("wrong")
    assert (wrong.code, "does not follow the grammar" in wrong.message) == (FAILED, True)
    assert set(results.values()) == {None}
    for name in ("old", "again"):
        constraint = requests[name].constraint
        assert isinstance(constraint, GrammarConstraint)
        assert {constraint.accept(token_id) for token_id in [*rest.encode(), EOS]} == {None}
        assert constraint.is_terminated


def test_only_old_outputs_have_a_grammar_without_the_limit(backend: Backend) -> None:
    spec = spec_of(StructuredOutputsParams(json={"type": "number"}))
    unlimited = dataclasses.replace(spec, has_any_length=True)
    assert spec != unlimited  # or the cache would mix them up
    assert accepted(backend, unlimited, list(LONG)) == list(LONG)
    assert all(math.isfinite(float(text)) for text in SHORT)


def test_a_grammar_without_numbers_stays_the_same() -> None:
    ebnf = 'root ::= (([0-9]*))\nother ::= TagDispatch(\n  ("<f", root),\n  loop_after_dispatch=true\n)\n'
    assert limit_numbers(ebnf).strip() == ebnf.strip()
