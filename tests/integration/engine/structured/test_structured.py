"""Outputs follow their grammars: sampled from a random model, in mixed batches, after preemption and resumption."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from penstock.producer.openai.tools.custom import InputGrammar
from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.outcome import FinishReason
from penstock.worker.engine.core.engine_core import EngineCore

from .cases import (
    CHOICES,
    EBNF,
    EBNF_AS_REGEX,
    LEGACY_TAG,
    REGEXES,
    SCHEMAS,
    TAG,
    TAG_SCHEMA,
    assert_valid,
)
from .harness import ask, run

BACKENDS = ("xgrammar", "llguidance")
PLAIN = {"temperature": 1.0, "max_tokens": 40}


def every_kind() -> dict[str, dict[str, Any]]:
    """A grammar of each kind, among requests without one."""
    return {
        "json": {"json": SCHEMAS["nested objects"], "disable_any_whitespace": True},
        "tree": {"json": json.dumps(SCHEMAS["patterns"]), "disable_any_whitespace": True},
        "regex": {"regex": REGEXES[0]},
        "choice": {"choice": CHOICES[2]},
        "ebnf": {"grammar": EBNF},
        "long": {"regex": "[a-z]{90}"},
        "as long": {"regex": "[0-9]{90}"},
    }


def test_json_output_matches_the_schema(core: EngineCore, text_of: Callable[[EngineCoreOutput], str]) -> None:
    requests = [
        ask(f"{name}/{i}", {"json": schema, "disable_any_whitespace": True})
        for name, schema in SCHEMAS.items()
        for i in range(4)
    ]
    values: dict[str, set[str]] = {name: set() for name in SCHEMAS}
    num_finished = 0
    for request_id, output in run(core, requests).items():
        name = request_id.split("/")[0]
        assert output.error is None, (request_id, output.error)
        if output.finish_reason is FinishReason.STOP:
            num_finished += 1
            values[name].add(json.dumps(assert_valid(text_of(output), SCHEMAS[name])))
    assert num_finished > 0.9 * len(requests)
    assert all(values.values())
    assert sum(len(different) > 1 for different in values.values()) > 0.8 * len(SCHEMAS), "a model that repeats itself"


def test_json_may_have_any_whitespace(core: EngineCore, text_of: Callable[[EngineCoreOutput], str]) -> None:
    outputs = run(core, [ask(str(i), {"json": SCHEMAS["array with bounds"]}) for i in range(8)])
    texts = [text_of(output) for output in outputs.values() if output.finish_reason is FinishReason.STOP]
    assert texts
    for text in texts:
        assert_valid(text, SCHEMAS["array with bounds"])


def test_any_json_object(core: EngineCore, text_of: Callable[[EngineCoreOutput], str]) -> None:
    # A random model makes long keys; what ends does so as an object.
    requests = [ask(str(i), {"json_object": True, "disable_any_whitespace": True}, max_tokens=900) for i in range(8)]
    texts = [text_of(o) for o in run(core, requests).values() if o.finish_reason is FinishReason.STOP]
    assert texts
    assert all(isinstance(json.loads(text), dict) for text in texts)


def test_regex_choice_and_ebnf(core: EngineCore, text_of: Callable[[EngineCoreOutput], str]) -> None:
    grammars: dict[str, dict[str, Any]] = {f"regex {i}": {"regex": regex} for i, regex in enumerate(REGEXES)}
    grammars |= {f"choice {i}": {"choice": choice} for i, choice in enumerate(CHOICES)} | {"ebnf": {"grammar": EBNF}}
    wholes = run(core, [ask(f"{name}/{i}", grammar) for name, grammar in grammars.items() for i in range(5)])
    for request_id, output in wholes.items():
        name, text = request_id.split("/")[0], text_of(output)
        assert (output.error, output.finish_reason) == (None, FinishReason.STOP), request_id
        grammar = grammars[name]
        if "choice" in grammar:
            assert text in grammar["choice"]
        else:
            # Of \d and its like xgrammar knows ASCII's, llguidance Unicode's.
            regex = grammar.get("regex", EBNF_AS_REGEX)
            assert re.fullmatch(regex, text) or re.fullmatch(regex, text, re.ASCII), (request_id, text)


def test_structural_tags(core: EngineCore, text_of: Callable[[EngineCoreOutput], str]) -> None:
    biased = {ord(char) - 30: 5.0 for char in "<cal"}  # bytes 0x21 and on have the ids 3 and on
    outputs = run(core, [ask(f"legacy {i}", {"structural_tag": LEGACY_TAG}, logit_bias=biased) for i in range(4)])
    tags = [tag for o in outputs.values() for tag in re.findall("<call>(.*?)</call>", text_of(o), re.DOTALL)]
    assert {output.error for output in outputs.values()} == {None}
    for tag in tags:
        assert_valid(tag, TAG_SCHEMA)


def test_structural_tags_of_the_newer_form(
    make: Callable[..., EngineCore], text_of: Callable[[EngineCoreOutput], str]
) -> None:
    (output,) = run(make(), [ask("tag", {"structural_tag": TAG})]).values()
    found = re.fullmatch("<call>(.*)</call>", text_of(output), re.DOTALL)
    assert found
    assert_valid(found[1], TAG_SCHEMA)
    (output,) = run(make(structured_outputs_backend="llguidance"), [ask("tag", {"structural_tag": TAG})]).values()
    assert output.error is not None
    assert "xgrammar" in output.error.message


@pytest.mark.parametrize("in_json", [False, True])
def test_inputs_of_tools_follow_their_grammars_in_free_text(
    make: Callable[..., EngineCore], text_of: Callable[[EngineCoreOutput], str], in_json: bool
) -> None:
    node = InputGrammar("note", "lark", 'start: line+\nline: /[+-]["a-c]{1,4}/ "\\n"').node(in_json=in_json)
    tag = {"type": "tag", "begin": "<", "content": node, "end": ">"}
    free = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<"], "tags": [tag]}}
    params: dict[str, Any] = {"logit_bias": {ord("<") - 30: 5.0, ord(">") - 30: 5.0}, "max_tokens": 120}
    outputs = run(make(), [ask(f"input {i}", {"structural_tag": json.dumps(free)}, **params) for i in range(4)])
    assert {output.error for output in outputs.values()} == {None}
    inputs = [tag for output in outputs.values() for tag in re.findall("<([^>]*)>", text_of(output))]
    assert len(inputs) > 4, [text_of(output) for output in outputs.values()]
    for text in inputs:
        assert re.fullmatch('([+-]["a-c]{1,4}\n)+', json.loads(f'"{text}"') if in_json else text)


def test_max_tokens_cuts(core: EngineCore, text_of: Callable[[EngineCoreOutput], str]) -> None:
    (output,) = run(core, [ask("cut", {"regex": "[a-z]{50}"}, max_tokens=7)]).values()
    assert (output.finish_reason, len(output.new_token_ids)) == (FinishReason.LENGTH, 7)
    assert re.fullmatch("[a-z]+", text_of(output))


def test_the_end_of_a_grammar_ends_the_request(core: EngineCore, text_of: Callable[[EngineCoreOutput], str]) -> None:
    """The request ends even if other parameters would continue it, because no token may follow."""
    cases: dict[str, dict[str, Any]] = {
        "ignored": {"ignore_eos": True},
        "min_tokens": {"min_tokens": 30},
        "stop": {"stop_token_ids": [70]},
    }
    wholes = run(core, [ask(name, {"choice": ["yes", "no"]}, **params) for name, params in cases.items()])
    for name, output in wholes.items():
        assert (output.error, output.finish_reason) == (None, FinishReason.STOP), name
        tokens = output.new_token_ids
        assert tokens[-1] in (2, 70)
        output.new_token_ids = tokens[:-1]
        assert text_of(output) in ("yes", "no")
    # Where the grammar goes on, min_tokens holds.
    (longer,) = run(core, [ask("long", {"regex": "[a-z]*"}, min_tokens=30, max_tokens=300)]).values()
    assert len(longer.new_token_ids) >= 30


def test_rules_and_penalties_hold_inside_the_grammar(
    core: EngineCore, text_of: Callable[[EngineCoreOutput], str]
) -> None:
    letters = {char: ord(char) - 30 for char in "abz"}
    wholes = run(
        core,
        [
            ask("bias", {"regex": "[a-z]{20}"}, logit_bias={letters["z"]: 100.0}),
            ask("allowed", {"regex": "[a-z]{20}"}, allowed_token_ids=[letters["a"], letters["z"], 200, 2]),
            ask("penalties", {"regex": "[ab]{20}"}, repetition_penalty=1.5, presence_penalty=1.0, logprobs=2),
            ask("nothing left", {"regex": "[a-c]{20}"}, allowed_token_ids=[letters["z"]]),
        ],
    )
    assert text_of(wholes["bias"]) == "z" * 20
    assert set(text_of(wholes["allowed"])) == {"a", "z"}
    assert re.fullmatch("[ab]{20}", text_of(wholes["penalties"]))
    error = wholes["nothing left"].error
    assert error is not None
    assert error.code == "validation_error"
    assert "allowed_token_ids" in error.message


def test_neighbours_without_a_grammar_get_the_tokens_they_would_have_had(make: Callable[..., EngineCore]) -> None:
    core = make()
    plain = [ask(f"plain {i}", None, **PLAIN, top_p=0.9 if i % 2 else 1.0) for i in range(5)]
    alone = run(core, plain)
    mixed = run(core, [*plain, *(ask(name, grammar) for name, grammar in every_kind().items())])
    for name, output in alone.items():
        assert mixed[name].new_token_ids == output.new_token_ids


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("deterministic", [False, True], ids=["ordinary", "deterministic"])
def test_a_resumed_request_continues_in_its_grammar(
    make: Callable[..., EngineCore], backend: str, deterministic: bool
) -> None:
    """Resume after each of the first tokens and some later ones, on an engine that preempts."""
    options: dict[str, Any] = {"structured_outputs_backend": backend, "deterministic": deterministic}
    core = make(**options)
    cramped = make(num_blocks=38, block_size=4, max_model_len=150, max_num_seqs=6, max_num_batched_tokens=8, **options)
    params: dict[str, Any] = {"max_tokens": 100}
    wholes = run(core, [ask(name, grammar, **params) for name, grammar in every_kind().items()])
    longest = max(len(output.new_token_ids) for output in wholes.values())
    for num_delivered in (*range(4), *range(5, longest, 33)):
        given = {
            name: output.new_token_ids[:num_delivered]
            for name, output in wholes.items()
            if len(output.new_token_ids) > num_delivered
        }
        again = [ask(name, every_kind()[name], tokens, **params) for name, tokens in given.items()]
        for name, output in run(cramped, again).items():
            assert output.error is None
            assert given[name] + output.new_token_ids == wholes[name].new_token_ids
            assert output.finish_reason == wholes[name].finish_reason
    assert cramped.scheduler.stats().num_preemptions > 0


def test_numbers_have_a_limited_length(core: EngineCore, text_of: Callable[[EngineCoreOutput], str]) -> None:
    """Covers a model that prefers digits. A longer number from an older engine is completed."""
    digit, schema = {ord("7") - 30: 100.0}, {"type": "integer"}
    long = [ord(char) - 30 for char in "7" * 250]
    requests = [
        ask("new", {"json": schema}, logit_bias=digit, max_tokens=400),
        ask("old", {"json": schema}, long, logit_bias=digit, max_tokens=300),
    ]
    outputs = run(core, requests)
    assert (text_of(outputs["new"]), outputs["new"].finish_reason) == ("7" * 200, FinishReason.STOP)
    assert (text_of(outputs["old"]), outputs["old"].finish_reason) == ("7" * 50, FinishReason.LENGTH)


def test_a_fully_delivered_request_ends_immediately(core: EngineCore) -> None:
    (whole,) = run(core, [ask("all", {"choice": ["no"]}, ignore_eos=True)]).values()
    (output,) = run(core, [ask("all", {"choice": ["no"]}, whole.new_token_ids, ignore_eos=True)]).values()
    assert (output.new_token_ids, output.finish_reason) == ([], FinishReason.STOP)
