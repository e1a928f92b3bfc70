"""Templates render as in transformers: each tag, filter and global, compared with its own environment."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import Environment, TemplateError
from jinja2.exceptions import SecurityError

from penstock.worker.text.chat_template import make_environment

NAMES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a <b> é\n"}, {"role": "assistant", "content": "b"}],
    "tools": [{"name": "f", "parameters": {"z": 1, "a": ["é", None, True]}}],
}

# SmolLM3's and Phi-4-reasoning's templates mark replies by the tag.
TEMPLATES = {
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "generation with dashes": "a \n{%- generation -%}\n b {{ messages[0].role }}\n{%- endgeneration -%}\n c",
    "generation in lines": "x\n  {% generation %}\n  y\n  {% endgeneration %}\nz\n",
    "generation is a scope": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "generation sees the loop": "{% for m in messages %}{% generation %}{{ loop.index }}{% endgeneration %}"
    "{% endfor %}",
    "generation in a macro": "{% macro f(t) %}{% generation %}{{ t }}{% endgeneration %}{% endmacro %}{{ f('q') }}",
    "break": "{% for m in messages %}{{ m.role }}{% break %}{% endfor %}",
    "continue": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "trim and lstrip blocks": "a\n   {% if true %}\n  b\n   {% endif %}\n\nc\n",
    "last newline": "a\n\n",
    "comment": "a\n  {# no #}\nb",
    "tojson": "{{ tools | tojson }}",
    "tojson keeps HTML": "{{ '<a href=\"x\">&\\'' | tojson }}",
    "tojson ensure_ascii": "{{ tools | tojson(ensure_ascii=True) }}{{ tools | tojson(ensure_ascii=False) }}",
    "tojson ensure_ascii by place": "{{ tools | tojson(true) }}",
    "tojson indent": "{{ tools | tojson(indent=2) }}",
    "tojson separators": "{{ tools | tojson(separators=(',', ':')) }}",
    "tojson sort_keys": "{{ tools | tojson(sort_keys=true) }}",
    "tojson of what is no JSON": "{{ tools | tojson(nothing=1) }}",
    "strftime_now": "{{ strftime_now('%Y') | length }}",
    "raise_exception": "{{ raise_exception('not so') }}",
    "namespace": "{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ n.b is defined }}",
    "namespace of a dict": "{% set n = namespace({'a': 1}, b=2) %}{{ n.a }}{{ n.b }}",
    "namespace with self": "{% set n = namespace(self=3) %}{{ n.self }}",
    "dict": "{{ dict(a=1, **{'b': 2}) }}{{ dict([('c', 3)]) }}",
    "range and cycler": "{% set c = cycler('a', 'b') %}{% for i in range(3) %}{{ c.next() }}{% endfor %}",
    "joiner and lipsum": "{% set j = joiner('|') %}{{ j() }}x{{ j() }}{{ lipsum is callable }}",
    "undefined": "{{ nothing }}{{ nothing is defined }}",
    "attribute of undefined": "{{ nothing.at_all }}",
    "no autoescape": "{{ messages[0].content }}",
    "items and methods": "{{ messages[0].items() | list }}{{ 'a b'.split(' ') }}{{ ' x '.strip() }}",
    "startswith": "{{ messages[0]['content'].startswith('a') }}{{ messages[::-1][0].role }}",
    "slices and in": "{{ messages[:1] | length }}{{ 'a' in messages[0].content }}{{ 'tools' in messages[0] }}",
    "filters": "{{ ' a ' | trim }}{{ [1, 2] | join(',') }}{{ 'a' | upper }}"
    "{{ messages | selectattr('role', 'eq', 'user') | map(attribute='content') | first | indent(2) }}",
    "tests": "{{ 1 is number }}{{ 'a' is string }}{{ {} is mapping }}{{ [] is iterable }}{{ none is none }}",
    "macro with caller": "{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}x{% endcall %}",
    "set block": "{% set x %}a{% endset %}{{ x }}",
    "change of an argument": "{{ messages.append(1) }}",
    "change of a dict": "{{ messages[0].update({'role': 'x'}) }}",
    "a way to Python": "{{ messages.__class__.__mro__ }}",
    "a way to Python by format": "{{ '{0.__class__}'.format(messages) }}",
    "a large range": "{{ range(10**9) | length }}",
    "do is no tag": "{% do messages %}",
    "trans is no tag": "{% trans %}x{% endtrans %}",
    "debug is no tag": "{% debug %}",
    "generation that does not end": "{% generation %}x",
}


def outcome(template: str, environment: Environment) -> str | type[Exception]:
    try:
        return environment.from_string(template).render(**NAMES)
    except Exception as error:
        return type(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    theirs = transformers._compile_jinja_template("x").environment
    assert outcome(TEMPLATES[name], make_environment()) == outcome(TEMPLATES[name], theirs)


@pytest.mark.slow
def test_tags_filters_tests_and_globals_have_the_names_of_transformers() -> None:
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    theirs, ours = transformers._compile_jinja_template("x").environment, make_environment()
    assert {tag for extension in ours.extensions.values() for tag in extension.tags} == {
        tag for extension in theirs.extensions.values() for tag in extension.tags
    }
    assert ours.filters.keys() == theirs.filters.keys()
    assert ours.tests.keys() == theirs.tests.keys()
    assert ours.globals.keys() == theirs.globals.keys()
    for setting in ("trim_blocks", "lstrip_blocks", "keep_trailing_newline", "autoescape", "undefined", "finalize"):
        assert getattr(ours, setting) == getattr(theirs, setting)


def test_a_reply_marked_for_training_is_its_content() -> None:
    assert outcome(TEMPLATES["generation"], make_environment()) == "a <b> é\nb"
    assert outcome(TEMPLATES["generation is a scope"], make_environment()) == "21"


# Older releases of transformers let templates store such names.
@pytest.mark.parametrize(
    "template", ["{% set n = namespace(__class__=1) %}", "{% set n = namespace() %}{% set n._a = 1 %}"]
)
def test_names_with_an_underscore_are_refused(template: str) -> None:
    assert outcome(template, make_environment()) is SecurityError


def test_exceptions_in_a_template_are_template_errors() -> None:
    assert outcome(TEMPLATES["raise_exception"], make_environment()) is TemplateError
