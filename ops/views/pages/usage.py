"""Use of tenants, keys, models and adapters, and their budgets."""

from __future__ import annotations

from typing import Any

import msgspec

from ....producer.control.usage import Grouping, Usage, UsageQuery, read_usage, show_time, total_of, usage_span
from ....shared.errors import ValidationError
from ....shared.partitions.budgets import sync_budgets
from ....shared.queue.budgets import BudgetState
from ..access import Access
from ..page import Page, PageSection, Params, View
from ..source import PageSnapshot, together

MOST_SHOWN = 500
_NAMED = (Grouping.KEY, Grouping.ADAPTER)


async def _read_usage(snapshot: PageSnapshot, params: Params, _: Access) -> View:
    source = snapshot.source
    by = params.get("by") or Grouping.TENANT.value
    if by not in tuple(Grouping):
        raise ValidationError(f"by must be one of {', '.join(Grouping)}, got {by!r}")
    first, last = params.get("from") or None, params.get("to") or None
    start, end = usage_span(first, last, snapshot.at)
    query = UsageQuery(
        start=start,
        end=end,
        by=Grouping(by),
        tenant=params.get("tenant") or None,
        model=params.get("model") or None,
    )
    usages, budgets = await together(
        read_usage(source.connection, source.keys, query), sync_budgets(source.connection, source.keys)
    )
    return {
        "rows": [_usage_row(usage, query) for usage in usages[:MOST_SHOWN]],
        "total": _usage_row(total_of(usages), query),
        "more": max(0, len(usages) - MOST_SHOWN),
        "budgets": [_budget_row(state) for state in budgets],
        "by": by,
        "groupings": list(Grouping),
        "first": first or show_time(start),
        "last": last or show_time(end - 1),
        "tenant": query.tenant or "",
        "model": query.model or "",
    }


def _usage_row(usage: Usage, query: UsageQuery) -> dict[str, Any]:
    sums = msgspec.structs.asdict(usage.sums)
    name = usage.name or ("-" if query.by in _NAMED else "")
    return {"group": usage.group, "name": name, "requests": usage.sums.num_requests, **sums}


def _budget_row(state: BudgetState) -> dict[str, Any]:
    budget = state.budget
    renewed = "never" if state.renewed_at is None else show_time(state.renewed_at)
    fields = {"tenant": budget.tenant, "key": budget.key_name, "period": budget.period, "unit": budget.unit}
    return {**fields, "spent": round(state.spent, 6), "limit": budget.limit, "share": state.share, "renewed": renewed}


SECTION = PageSection(
    (
        Page(
            "usage",
            "/usage",
            "Usage",
            _read_usage,
            live=False,
            query=("by", "from", "to", "tenant", "model"),
            nav="Usage",
        ),
    )
)
