"""Use of tenants, keys, models and adapters, and their budgets."""

from __future__ import annotations

from typing import Any

import msgspec

from ....producer.control.secret_keys import Role
from ....producer.control.usage import (
    Grouping,
    Usage,
    UsageQuery,
    format_prices,
    parse_prices,
    read_usage,
    show_time,
    total_of,
    usage_span,
)
from ....shared.errors import ValidationError
from ....shared.partitions.budgets import sync_budgets
from ....shared.queue.budgets import PERIOD_WORDS, Budget, BudgetState, Period, Unit
from ..access import Access
from ..page import Action, ActionContext, Page, PageSection, Params, View, field_of, number_field
from ..source import PageSnapshot, together

MOST_SHOWN = 500
# A page that is updated every second brings the budgets up to date this often.
BUDGETS_CACHED_S = 5.0
_NAMED = (Grouping.KEY, Grouping.ADAPTER)
# What each row of a grouping is, and what its name is.
_HEADINGS = {Grouping.KEY: ("Tenant", "Key"), Grouping.ADAPTER: ("Model", "Adapter")}


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
        read_usage(source.connection, source.keys, query, source.prices), read_budgets(snapshot)
    )
    return {
        "rows": [_usage_row(usage, query) for usage in usages[:MOST_SHOWN]],
        "total": _usage_row(total_of(usages), query),
        "more": max(0, len(usages) - MOST_SHOWN),
        "has_prices": source.prices is not None,
        "currency": "" if source.prices is None else source.prices.currency,
        "budgets": budgets,
        "periods": list(Period),
        "by": by,
        "has_names": query.by in _NAMED,
        "headings": _HEADINGS.get(query.by, (by.capitalize(), "Name")),
        "groupings": list(Grouping),
        "first": first or show_time(start),
        "last": last or show_time(end - 1),
        "tenant": query.tenant or "",
        "model": query.model or "",
    }


def _usage_row(usage: Usage, query: UsageQuery) -> dict[str, Any]:
    sums = msgspec.structs.asdict(usage.sums)
    name = usage.name or ("-" if query.by in _NAMED else "")
    return {"group": usage.group, "name": name, "requests": usage.sums.num_requests, **sums, "cost": usage.cost}


async def read_budgets(snapshot: PageSnapshot, tenant: str | None = None) -> list[dict[str, Any]]:
    """Return all budgets, or those of a tenant, with the amounts spent, as rows."""
    source = snapshot.source

    async def read_states() -> list[BudgetState]:
        return await sync_budgets(source.connection, source.keys)

    states = await source.cached("budgets", BUDGETS_CACHED_S, read_states)
    return [_budget_row(state) for state in states if tenant in (None, state.budget.tenant)]


def _budget_row(state: BudgetState) -> dict[str, Any]:
    budget = state.budget
    return {
        "tenant": budget.tenant,
        "key": budget.key_name,
        "period": budget.period.value,
        "period_words": PERIOD_WORDS[budget.period],
        "unit": budget.unit.value,
        "spent": float(f"{state.spent:.10g}"),
        "limit": budget.limit,
        "share": state.share,
        "renewed": "never" if state.renewed_at is None else show_time(state.renewed_at),
        "prices": format_prices(budget.prices),
        "webhook": budget.webhook_url,
    }


async def _read_budget(snapshot: PageSnapshot, params: Params, access: Access) -> View:
    tenant, key, period = field_of(params, "tenant"), params.get("key", ""), _period(params)
    rows = [row for row in await read_budgets(snapshot, tenant) if (row["key"], row["period"]) == (key, period.value)]
    if not access.role.covers(Role.OPERATOR):
        rows = [row | {"webhook": ""} for row in rows]  # its query may contain a secret of the receiver
    return {
        "tenant": tenant,
        "key": key,
        "period": period.value,
        "period_words": PERIOD_WORDS[period],
        "units": list(Unit),
        "budget": next(iter(rows), None),
        "rows": rows,
    }


def _period(params: Params) -> Period:
    text = params.get("per") or Period.MONTH.value
    if text not in tuple(Period):
        raise ValidationError(f"per must be one of {', '.join(Period)}, got {text!r}")
    return Period(text)


async def _set_budget(context: ActionContext) -> str:
    source, form, period = context.source, context.form, _period(context.form)
    unit, prices = form.get("unit", Unit.TOKENS.value), form.get("prices", "").strip()
    if unit not in tuple(Unit):
        raise ValidationError(f"unit must be one of {', '.join(Unit)}, got {unit!r}")
    if prices and unit == Unit.TOKENS:
        raise ValidationError("prices are of budgets in cost; select cost, or leave prices empty")
    budget = Budget(
        tenant=field_of(form, "tenant"),
        key_name=form.get("key", ""),
        period=period,
        unit=Unit(unit),
        limit=number_field("limit", field_of(form, "limit")),
        prices=parse_prices(prices).models,
        webhook_url=form.get("webhook", "").strip(),
    ).validated()
    await source.operations.set_budget(budget)
    counts = "from when it was first set" if period is Period.ALL else "what was used before in this period"
    return f"the budget of {budget.tenant} is set; it counts {counts}"


async def _remove_budget(context: ActionContext) -> str:
    source, form = context.source, context.form
    tenant = field_of(form, "tenant")
    budget = Budget(tenant=tenant, key_name=form.get("key", ""), period=_period(form), limit=1)
    if not await source.operations.remove_budget(budget):
        raise ValidationError(f"{tenant} has no such budget; it may have been removed already")
    return f"the budget of {tenant} is removed; its requests are no longer limited by it"


SECTION = PageSection(
    (
        Page(
            "budget",
            "/budget",
            "Budget · {tenant} {key}",
            _read_budget,
            live=False,
            query=("tenant", "key", "per"),
        ),
        Page(
            "usage",
            "/usage",
            "Usage",
            _read_usage,
            live=False,
            query=("by", "from", "to", "tenant", "model"),
            nav="Usage",
        ),
    ),
    (
        Action("/budget/set", Role.OPERATOR, _set_budget, "budget"),
        Action("/budget/remove", Role.OPERATOR, _remove_budget, "usage", confirm="tenant"),
    ),
)
