"""Who has changed what."""

from __future__ import annotations

import msgspec

from ..access import Access
from ..page import Page, Params, Room, View
from ..source import Moment

PAGE_ROWS = 100


async def _read(moment: Moment, params: Params, _: Access) -> View:
    before = params.get("before", "")
    entries = await moment.source.audit.read(limit=PAGE_ROWS, before=before if _is_entry_id(before) else "")
    rows = [
        {name: value for name, value in msgspec.structs.asdict(one).items() if name != "version"} for one in entries
    ]
    return {"rows": rows, "next": entries[-1].entry_id if len(entries) >= PAGE_ROWS else None}


def _is_entry_id(text: str) -> bool:
    milliseconds, dash, number = text.partition("-")
    return bool(dash) and milliseconds.isdecimal() and number.isdecimal() and len(text) < 40


ROOM = Room((Page("audit", "/audit", "Audit", _read, query=("before",), nav="Audit"),))
