"""Tables in Markdown, and the descriptions that docstrings have of fields."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence

_SECTION = re.compile(r"^(?P<head>[^\n]*:)\n(?P<lines>(?: {4}[^\n]*(?:\n|$))+)", re.MULTILINE)
_FIELD = re.compile(r"^ {4}(?P<names>\w+(?:, \w+)*): (?P<text>[^\n]*(?:\n {5,}[^\n]*)*)", re.MULTILINE)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table and an empty line: without the columns that have no text, and nothing without rows."""
    columns = [column for column in zip(header, *rows, strict=True) if any(column[1:])]
    head, *lines = zip(*columns, strict=True) if columns else ((),)
    if lines:
        yield from (_line(head), _line(["---"] * len(head)), *map(_line, lines), "")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def split_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring without its sections of fields, and the descriptions of fields."""
    fields: dict[str, str] = {}

    def take(section: re.Match[str]) -> str:
        matches = list(_FIELD.finditer(section["lines"]))
        for match in matches:
            fields.update(dict.fromkeys(match["names"].split(", "), " ".join(match["text"].split())))
        return "" if matches else section[0]

    text = _SECTION.sub(take, inspect.cleandoc(docstring))
    return text.strip(), fields
