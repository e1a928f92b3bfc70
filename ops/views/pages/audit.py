"""Log of changes by operators."""

from __future__ import annotations

import msgspec

from ..access import Access
from ..page import Page, PageSection, Params, View
from ..sentences import audit_sentence
from ..source import PageSnapshot

PAGE_ROWS = 100


async def _read_audit(snapshot: PageSnapshot, params: Params, _: Access) -> View:
    before = params.get("before", "")
    entries = await snapshot.source.audit.read(limit=PAGE_ROWS, before=before if _is_entry_id(before) else "")
    rows = [
        {name: value for name, value in msgspec.structs.asdict(entry).items() if name != "version"}
        | {"change": audit_sentence(entry)}
        for entry in entries
    ]
    return {"rows": rows, "next": entries[-1].entry_id if len(entries) >= PAGE_ROWS else None}


def _is_entry_id(text: str) -> bool:
    milliseconds, dash, number = text.partition("-")
    return bool(dash) and milliseconds.isdecimal() and number.isdecimal() and len(text) < 40


SECTION = PageSection((Page("audit", "/audit", "Audit", _read_audit, query=("before",), nav="Audit"),))
