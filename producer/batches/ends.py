"""The webhook event of the end of a batch, created once."""

from __future__ import annotations

import hashlib

import msgspec

from ..webhooks.event_records import WebhookEvent
from .batch_records import BatchRecord


def event_of_end(record: BatchRecord) -> WebhookEvent | None:
    """Return the event of an ended batch; None if it has no webhook. Its id is derived from the batch and its status.

    Types and body: https://platform.openai.com/docs/guides/webhooks.
    """
    spec, batch = record.spec, record.batch
    if spec.webhook_url is None:
        return None
    event_id = f"evt_{hashlib.sha256(f'{batch.id} {batch.status}'.encode()).hexdigest()[:40]}"
    event_type, ended_at = f"batch.{batch.status}", getattr(batch, f"{batch.status}_at")
    body = {"object": "event", "id": event_id, "type": event_type, "created_at": ended_at, "data": {"id": batch.id}}
    return WebhookEvent(
        event_id=event_id,
        type=event_type,
        url=spec.webhook_url,
        tenant=spec.tenant,
        created_at=ended_at,
        body=msgspec.json.encode(body).decode(),
    )
