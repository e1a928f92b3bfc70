"""Batches: those that are open, of all tenants, and those of one tenant."""

from __future__ import annotations

from typing import Any

from ....producer.batches.batch_records import Batch
from ....producer.operator_keys import Role
from ..access import Access
from ..page import Act, Action, Page, Params, Room, View, field_of
from ..source import Moment


async def _read(moment: Moment, params: Params, _: Access) -> View:
    store, tenant = moment.source.batches, params.get("tenant", "")
    if tenant:
        page = await store.list(tenant=tenant, limit=100, after=params.get("after") or None)
        rows = [_row(tenant, batch) for batch in page.data]
        return {"rows": rows, "tenant": tenant, "next": page.last_id if page.has_more else None}
    records = await store.open_batches()
    return {"rows": [_row(one.spec.tenant, one.batch) for one in records], "tenant": "", "next": None}


def _row(tenant: str, batch: Batch) -> dict[str, Any]:
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


async def _cancel(act: Act) -> str:
    batch_id, tenant = field_of(act.form, "id"), field_of(act.form, "of")
    async with act.source.audit.audited("batch.cancel", batch_id, tenant=tenant):
        await act.source.batches.cancel(batch_id, tenant=tenant)
    return f"{batch_id} ends within a second, and keeps what is done"


ROOM = Room(
    pages=(Page("batches", "/batches", "Batches · {tenant}", _read, query=("tenant", "after"), nav="Batches"),),
    actions=(Action("/batches/cancel", Role.OPERATOR, _cancel, "batches"),),
)
