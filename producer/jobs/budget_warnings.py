"""Webhook events when a budget is nearly, or wholly, used up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from redis.exceptions import NoPermissionError

from ...shared.partitions.budgets import BudgetStore, sync_budgets
from ...shared.queue.budgets import BudgetState
from ..webhooks.events import WebhookEvent, derived_event_id, new_event

if TYPE_CHECKING:
    from .context import JobContext

PATIENCE_S = 1.0
# Share of a budget -> type of the event.
THRESHOLDS = {0.8: "budget.warning", 1.0: "budget.exhausted"}


async def warn_of_budgets(context: JobContext) -> None:
    """Create the events that are due. Each is created once per budget, limit, period and threshold."""
    try:
        budgets = await BudgetStore(context.connection, context.keys).read_all()
    except NoPermissionError:
        return  # an ACL file of an older version; other work goes on
    if not any(budget.webhook_url for budget in budgets):
        return
    now = int((await context.connection.execute("TIME"))[0])
    try:
        async with asyncio.timeout(PATIENCE_S):
            states = await sync_budgets(context.connection, context.keys)
    except TimeoutError:
        return  # a shard is away; other work must not wait for it, and the next sweep tries again
    for state in states:
        for event in events_of(state, now):
            if event.event_id not in context.budget_events:
                await context.events.create(event)
                context.budget_events.add(event.event_id)


def events_of(state: BudgetState, now: int) -> list[WebhookEvent]:
    """Return the events of the thresholds that a budget has reached. Their ids are derived from it."""
    budget = state.budget
    return [
        _budget_event(state, event_type, now)
        for share, event_type in THRESHOLDS.items()
        if budget.webhook_url and state.share >= share
    ]


def _budget_event(state: BudgetState, event_type: str, now: int) -> WebhookEvent:
    budget = state.budget
    identity = f"{budget.name} {budget.unit} {budget.limit} {budget.since} {state.start} {event_type}"
    data = {
        "tenant": budget.tenant,
        "key": budget.key_name or None,
        "period": budget.period,
        "unit": budget.unit,
        "limit": budget.limit,
        "spent": state.spent,
        "renewed_at": state.renewed_at,
    }
    return new_event(derived_event_id(identity), event_type, budget.webhook_url, budget.tenant, now, data)
