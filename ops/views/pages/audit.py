"""Log of changes by operators."""

from __future__ import annotations

from typing import Any

import msgspec

from ....shared.deployment.audit import MAX_READ, AuditEntry
from ...words import parse_span
from ..access import Access
from ..page import Page, PageSection, Params, View
from ..sentences import audit_sentence
from ..source import PageSnapshot

PAGE_ROWS = 100
# A filtered list reads more entries than it shows.
FILTERED_CACHED_S = 5.0
NAMES = ("user", "text", "since", "until")


async def _read_audit(snapshot: PageSnapshot, params: Params, _: Access) -> View:
    span = parse_span(params, snapshot.at)
    since, until = span.get("since", 0.0), span.get("until")
    before = params.get("before", "")
    before = before if _is_entry_id(before) else "" if until is None else f"{int(1000 * until) + 1}-0"
    is_filtered = any(params.get(name) for name in NAMES)
    limit = MAX_READ if is_filtered else PAGE_ROWS

    async def read_entries() -> list[AuditEntry]:
        return await snapshot.source.audit.read(limit=limit, before=before)

    key = ("audit", before, *(params.get(name, "") for name in NAMES))
    entries = await (snapshot.source.cached(key, FILTERED_CACHED_S, read_entries) if is_filtered else read_entries())
    rows = [row for row in map(_audit_row, entries) if row["at"] >= since and _matches(row, params)]
    last = rows[PAGE_ROWS - 1] if len(rows) >= PAGE_ROWS else _audit_row(entries[-1]) if len(entries) >= limit else None
    has_more = last is not None and last["at"] >= since
    return {"rows": rows[:PAGE_ROWS], "next": last["entry_id"] if last is not None and has_more else None}


def _audit_row(entry: AuditEntry) -> dict[str, Any]:
    fields = {name: value for name, value in msgspec.structs.asdict(entry).items() if name != "version"}
    return fields | {"change": audit_sentence(entry)}


def _matches(row: dict[str, Any], params: Params) -> bool:
    return params.get("user", "") in ("", row["actor"]) and params.get("text", "").lower() in row["change"].lower()


def _is_entry_id(text: str) -> bool:
    milliseconds, dash, number = text.partition("-")
    return bool(dash) and milliseconds.isdecimal() and number.isdecimal() and len(text) < 40


SECTION = PageSection((Page("audit", "/audit", "Audit", _read_audit, query=(*NAMES, "before"), nav="Audit"),))
