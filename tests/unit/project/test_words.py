"""The sources and their tests are written in plain English: measures of their words, which may only fall.

Lower a limit when the code gets better. A failure lists the places that the measure counts.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from .test_imports import PARTS, ROOT, sources

# The first words of a docstring that starts with neither a verb nor a noun.
FRAGMENTS = {
    "what",
    "of",
    "as",
    "those",
    "which",
    "where",
    "whose",
    "by",
    "who",
    "whom",
    "how",
    "beside",
    "one",
    "that",
}
PARTICIPLES = {
    "told",
    "found",
    "made",
    "wanted",
    "given",
    "said",
    "known",
    "taken",
    "kept",
    "held",
    "written",
    "shown",
    "asked",
    "wished",
    "seen",
    "heard",
    "sent",
    "got",
    "come",
    "gone",
    "done",
    "lost",
    "meant",
    "spoken",
    "brought",
}
# Phrases that must be read twice; the field has plain words for each: "report", "next to", "no client".
UNUSUAL = re.compile(
    r"\b(told|beside|nobody|anybody|somebody|reckoned|under way|so many|goes on|is to be|are to be|whom|there are those"
    r"|in its stead|hands? back|taken back|what is)\b",
    re.IGNORECASE,
)
# Strings of each kind of quotes, since a "#" may stand in them.
STRING_OR_COMMENT = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(#[^\n]*)''',
    re.DOTALL,
)
# This many functions of one name make a search for one of them useless.
CROWD = 5
LIMITS: dict[str, dict[str, float]] = {
    "sources": {
        "'what' per 1,000 words of docstrings": 0.5,
        "unusual phrases per 1,000 words of docstrings and comments": 0.5,
        "docstrings that start with a fragment, per 1,000": 0.2,
        "variables named by a participle, per 1,000": 1.1,
        "splats of literal tuples": 0.0,
        "functions that share their name with four others, per 1,000": 199.0,
    },
    "tests": {
        "'what' per 1,000 words of docstrings": 9.0,
        "unusual phrases per 1,000 words of docstrings and comments": 5.4,
        "docstrings that start with a fragment, per 1,000": 90.6,
        "variables named by a participle, per 1,000": 27.1,
        "splats of literal tuples": 11.0,
        "functions that share their name with four others, per 1,000": 112.6,
    },
}

# One process reads every file once.
pytestmark = pytest.mark.xdist_group("sources")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Places = dict[str, list[str]]


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[Function | ast.ClassDef, str]]:
    for node in nodes:
        if isinstance(node, Function | ast.ClassDef) and (text := ast.get_docstring(node)):
            yield node, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each comment; the module ``tokenize`` takes ten times as long."""
    line, counted = 1, 0
    for match in STRING_OR_COMMENT.finditer(source):
        if match[1]:
            line += source.count("\n", counted, match.start())
            counted = match.start()
            yield line, match[1]


def assigned_names(nodes: Iterable[ast.AST]) -> Iterator[ast.Name]:
    """Yield each name that an assignment or a loop binds."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr | ast.For):
            targets = [node.target]
        else:
            continue
        for target in targets:
            yield from (name for name in ast.walk(target) if isinstance(name, ast.Name))


def files_of(group: str) -> list[Path]:
    parts = PARTS if group == "sources" else ("tests",)
    return [path for part in parts for path in sources(part)]


@cache
def measured(group: str) -> tuple[dict[str, float], Places]:
    """Return each measure's value over the files of a group, and the places that it counts."""
    totals: Counter[str] = Counter()
    places: Places = defaultdict(list)
    functions: dict[str, list[str]] = defaultdict(list)
    what, unusual, fragments, participles, splats, crowds = LIMITS[group]
    for path in files_of(group):
        source, name = path.read_text(), path.relative_to(ROOT)
        nodes = list(ast.walk(ast.parse(source)))
        texts = [(number, text) for number, text in comments(source)]
        for node, text in docstrings(nodes):
            words = re.findall(r"[A-Za-z']+", text.lower())
            totals[what] += len(words)
            totals[fragments] += 1
            places[what] += [f"{name}:{node.lineno} {node.name}"] * words.count("what")
            if words and words[0] in FRAGMENTS:
                places[fragments].append(f"{name}:{node.lineno} {node.name}: {text.splitlines()[0]}")
            texts.append((node.lineno, text))
        for number, text in texts:
            totals[unusual] += len(text.split())
            places[unusual] += [f"{name}:{number} {match[0]}" for match in UNUSUAL.finditer(text)]
        for target in assigned_names(nodes):
            totals[participles] += 1
            if target.id in PARTICIPLES:
                places[participles].append(f"{name}:{target.lineno} {target.id}")
        for node in nodes:
            if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List):
                is_load = isinstance(node.ctx, ast.Load)
                places[splats] += [f"{name}:{node.lineno}"] if is_load else []
            if isinstance(node, Function) and not node.name.startswith("__"):
                totals[crowds] += 1
                functions[node.name].append(f"{name}:{node.lineno} {node.name}")
    places[crowds] = [place for group in functions.values() if len(group) >= CROWD for place in group]
    return {
        key: 1000 * len(places[key]) / totals[key] if totals[key] else len(places[key]) for key in LIMITS[group]
    }, places


@pytest.mark.parametrize(("group", "measure"), [(group, measure) for group in LIMITS for measure in LIMITS[group]])
def test_the_words_of_the_sources_only_get_plainer(group: str, measure: str) -> None:
    values, places = measured(group)
    assert values[measure] <= LIMITS[group][measure], "\n".join(places[measure])
