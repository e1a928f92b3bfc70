"""Batches: the open ones of all tenants, or all of one tenant."""

from __future__ import annotations

from typing import Any

from ....producer.batches.batch_records import Batch
from ....producer.control.secret_keys import Role
from ..access import Access
from ..page import Action, ActionContext, Page, PageSection, Params, View, field_of
from ..source import PageSnapshot


async def _read_batches(snapshot: PageSnapshot, params: Params, _: Access) -> View:
    store, tenant = snapshot.source.batches, params.get("tenant", "")
    if tenant:
        page = await store.list(tenant=tenant, limit=100, after=params.get("after") or None)
        rows = [_batch_row(tenant, batch) for batch in page.data]
        return {"rows": rows, "tenant": tenant, "next": page.last_id if page.has_more else None}
    records = await store.open_batches()
    return {"rows": [_batch_row(record.spec.tenant, record.batch) for record in records], "tenant": "", "next": None}


def _batch_row(tenant: str, batch: Batch) -> dict[str, Any]:
    counts = batch.request_counts
    ended_at = batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at
    return {
        "batch": batch.id,
        "tenant": tenant,
        "model": batch.model or "",
        "status": batch.status.value,
        "endpoint": batch.endpoint,
        "rows": counts.total,
        "answered": counts.completed,
        "failed": counts.failed,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        "ended_at": ended_at,
        "error": batch.errors.data[0].message if batch.errors and batch.errors.data else "",
    }


async def _cancel_batch(context: ActionContext) -> str:
    batch_id, tenant = field_of(context.form, "id"), field_of(context.form, "of")
    async with context.source.audit.audited("batch.cancel", batch_id, tenant=tenant):
        await context.source.batches.cancel(batch_id, tenant=tenant)
    return f"{batch_id} ends within a second; finished requests keep their results"


SECTION = PageSection(
    pages=(Page("batches", "/batches", "Batches · {tenant}", _read_batches, query=("tenant", "after"), nav="Batches"),),
    actions=(Action("/batches/cancel", Role.OPERATOR, _cancel_batch, "batches"),),
)
