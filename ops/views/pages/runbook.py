"""The paragraphs about alerts of the guide, to which each problem links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ..access import Access
from ..page import Page, PageSection, Params, View
from ..source import PageSnapshot

# Read at import, because file access would block the event loop.
_GUIDE = (Path(__file__).parents[2] / "guide" / "operating" / "alerts.md").read_text()
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def _sections() -> Iterator[View]:
    """Yield the title and the paragraphs of each section; a paragraph is a list of texts, every second one code."""
    for section in re.split(r"\n###? ", _GUIDE)[1:]:
        title, _, text = section.partition("\n")
        paragraphs = [" ".join(part.split()) for part in _LINK.sub(r"\1", text).split("\n\n") if part.strip()]
        yield {"title": title.strip(), "paragraphs": [paragraph.split("`") for paragraph in paragraphs]}


_SECTIONS = tuple(_sections())


async def _read_runbook(_: PageSnapshot, __: Params, ___: Access) -> View:
    rows = [{"problem": one["title"], "text": "".join(map("".join, one["paragraphs"]))} for one in _SECTIONS]
    return {"sections": _SECTIONS, "rows": rows}


SECTION = PageSection((Page("runbook", "/runbook", "Runbook", _read_runbook, live=False),))
