"""Names in documents and docstrings exist."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .test_imports import PARTS, ROOT, sources, statements

GUIDE = sorted(ROOT.glob("ops/guide/**/*.md"))
DECISIONS = ROOT / "ops" / "decisions"
RECORDS = sorted(set(DECISIONS.glob("*")) - {DECISIONS / "README.md"})
NOTES = sorted(ROOT.glob("ops/lab/notes/*.md"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *GUIDE, *DECISIONS.glob("*.md"), *NOTES])
WRAPPED = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")),
    *GUIDE,
    *DECISIONS.glob("*.md"),
    *NOTES,
]
# The words of a decision, so that each stays one rule that is read in two minutes.
WORDS = range(200, 321)
MAX_COLUMNS = 120
LINK = re.compile(r"\]\(([^)\s]+)\)")
DECISION = re.compile(r"decisions/(\w[\w-]*)")
# Decisions were numbered before.
NUMBERED_DECISION = re.compile(r"\b[Dd]ecisions?\s+\d{4}\b")
FILES = {f"/{path.relative_to(ROOT)}" for part in (*PARTS, "tests") for path in (ROOT / part).rglob("*.*")}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def problem_in(document: Path, problem: object) -> str:
    """Return a problem with its document. One test reads all documents, because every lane collects each test."""
    return f"{document.relative_to(ROOT)}: {problem}"


def test_files_that_a_document_names_exist() -> None:
    missing: list[str] = []
    # With each of their ends.
    ends = {"/".join(parts[start:]) for file in FILES for parts in [file.split("/")] for start in range(1, len(parts))}
    for document in DOCUMENTS:
        names = set(re.findall(r"`([\w./-]+\.(?:py|lua|cpp|md))`", document.read_text()))
        ours = {name for name in names if not name.startswith(("/", "http", "../"))}
        missing += [
            problem_in(document, name)
            for name in sorted(ours - ends)
            if not (ROOT / name).exists() and not (document.parent / name).exists()
        ]
    assert missing == []


def prose(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a document that are neither code nor of a table, by number."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        if not (is_code or is_fence or line.startswith("|")):
            yield number, line


def test_prose_is_wrapped() -> None:
    """The target of a link does not count."""
    assert [
        problem_in(document, number)
        for document in WRAPPED
        for number, line in prose(document.read_text())
        if len(line) > MAX_COLUMNS and len(LINK.sub("]", line)) > MAX_COLUMNS
    ] == []


def test_rows_of_a_table_have_as_many_cells_as_its_header() -> None:
    uneven: list[str] = []
    for document in DOCUMENTS:
        num_columns = 0
        for number, line in enumerate(document.read_text().splitlines(), 1):
            num_cells = len(re.findall(r"(?<!\\)\|", line)) - 1 if line.startswith("|") else 0
            if num_cells and num_columns and num_cells != num_columns:
                uneven.append(problem_in(document, number))
            num_columns = num_cells and (num_columns or num_cells)
    assert uneven == []


@functools.cache
def anchors(document: Path) -> set[str]:
    """Return the targets that a link may name behind ``#``: its headings, as GitHub writes them."""
    headings = [line.lstrip("#").strip() for _, line in prose(document.read_text()) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_links_lead_to_something() -> None:
    broken: list[str] = []
    for document in DOCUMENTS:
        for link in LINK.findall(document.read_text()):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(problem_in(document, link))
    assert broken == []


# Messages of Python, and one that a function composes.
NOT_OURS = ("No module named ", "needs starlette: pip install", "object has no attribute ")


@pytest.mark.xdist_group("sources")
def test_messages_of_the_page_on_troubleshooting_are_printed_by_something() -> None:
    """Three words of each message stand in the sources; the others may be values."""
    page = (ROOT / "ops" / "guide" / "start" / "troubleshooting.md").read_text()
    code = re.sub(r"\"\n\s*f?\"", "", "\n".join(path.read_text() for part in PARTS for path in sources(part)))
    first_cells = re.findall(r"(?m)^\| (.+?) \| ", page)
    messages = [message for cell in first_cells for message in re.findall(r"`([^`]+ [^`]+ [^`]+)`", cell)]
    assert len(messages) >= 20
    unknown = []
    for message in messages:
        words = message.split()
        parts = [" ".join(words[start : start + 3]) for start in range(len(words) - 2)]
        if not any(part in code for part in parts) and not any(words in message for words in NOT_OURS):
            unknown.append(message)
    assert unknown == []


def test_a_decision_has_the_form_of_a_rule() -> None:
    for record in RECORDS:
        text = record.read_text()
        assert text.startswith("# "), record
        assert [part for part in ("Rule", "Why", "Rejected", "Code") if f"**{part}.**" not in text] == [], record
        assert len(text.split()) in WORDS, record
        paths = re.findall(r"`(\w+[/.][\w/.]+)`", text.rpartition("**Code.**")[2])
        assert paths, record
        assert [path for path in paths if not (ROOT / path).exists()] == [], record


def test_the_index_of_decisions_has_their_titles() -> None:
    lines = re.findall(r"^- \[.+\]\((\w+\.md)\): (.+)$", (DECISIONS / "README.md").read_text(), re.MULTILINE)
    titles = [(record.name, record.read_text().partition("\n")[0].removeprefix("# ")) for record in RECORDS]
    assert sorted((name, title.casefold()) for name, title in lines) == [(n, title.casefold()) for n, title in titles]


def texts() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file that may refer to a decision."""
    suffixes = {".py", ".lua", ".cpp", ".h", ".md", ".toml", ".txt", ".yaml", ".html"}
    within = (path for part in (*PARTS, "tests") for path in (ROOT / part).rglob("*"))
    for path in (*within, *ROOT.glob("*"), *ROOT.glob(".ci/*")):
        if path.is_file() and (path.suffix in suffixes or not path.suffix):
            yield str(path.relative_to(ROOT)), path.read_text(errors="replace")


@pytest.mark.xdist_group("sources")
def test_decisions_are_named_by_their_files() -> None:
    names = {record.stem for record in RECORDS} | {"README"}
    wrong = []
    for name, text in texts():
        if "ecision" not in text:
            continue
        wrong += [f"{name}: {decision}" for decision in DECISION.findall(text) if decision not in names]
        wrong += [f"{name}: {reference}" for reference in NUMBERED_DECISION.findall(text)]
    assert wrong == []


def documented_arguments(docstring: str) -> list[str]:
    """Names that an ``Args:`` section has; several may share a line."""
    section = re.search(r"^Args:\n((?:[ ]{4}.*\n?|\n)*)", docstring, re.MULTILINE)
    if section is None:
        return []
    heads = re.findall(r"^ {4}(\*{0,2}\w[\w, *]*):", section[1], re.MULTILINE)
    return [name.strip(" *") for head in heads for name in head.split(",")]


def signatures(tree: ast.Module) -> Iterator[tuple[str, int, str, set[str]]]:
    """Name, line, docstring and arguments of each function and class; a class has its fields and its init's."""
    for node in statements(tree):
        if isinstance(node, Function):
            yield node.name, node.lineno, ast.get_docstring(node) or "", arguments(node)
        elif isinstance(node, ast.ClassDef):
            annotated = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            fields = {target.id for target in annotated if isinstance(target, ast.Name)}
            made_by = [part for part in node.body if isinstance(part, Function) and part.name == "__init__"]
            parameters = fields.union(*map(arguments, made_by))
            # The parameters of a base class are documented where it is used.
            yield (
                node.name,
                node.lineno,
                "" if node.bases and not parameters else ast.get_docstring(node) or "",
                parameters,
            )


def arguments(node: Function) -> set[str]:
    args = node.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
    return {argument.arg for argument in every}


def test_args_sections_name_existing_arguments() -> None:
    stale = [
        f"{path.relative_to(ROOT)}:{line} {name}: {argument}"
        for part in PARTS
        for path in sources(part)
        if "Args:" in (text := path.read_text())
        for name, line, docstring, parameters in signatures(ast.parse(text))
        for argument in documented_arguments(docstring)
        if argument not in parameters
    ]
    assert stale == []
