"""/v1/batches: files of requests, which ``penstock jobs`` runs row by row."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...batches.batch_records import Batch, Page
from ...batches.batch_store import DEFAULT_LIMIT, MAX_LIMIT
from ..http import gateway_of, json_response, read_struct, trace_headers
from ..idempotency import reserve
from ..operations import Operation
from .files import AFTER, limit_of, query_parameter


class OutputExpiresAfter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """When the files of a batch expire: this many seconds after their creation."""

    seconds: int
    anchor: Literal["created_at"] = "created_at"


class BatchBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The request. ``webhook_url`` is an extension: it is notified of the end of the batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiresAfter | None = None
    webhook_url: str | None = None


async def create_batch(request: Request) -> Response:
    """Answer POST /v1/batches."""
    gateway, body = gateway_of(request), await read_struct(request, BatchBody)
    entry = await reserve(request)
    expires = body.output_expires_after
    batch = await gateway.batches.create(
        input_file_id=body.input_file_id,
        endpoint=body.endpoint,
        tenant=request.state.identity.tenant,
        completion_window=body.completion_window,
        metadata=body.metadata,
        output_expires_after_s=None if expires is None else expires.seconds,
        webhook_url=body.webhook_url,
        trace_headers=trace_headers(request.headers) or None,
        batch_id=None if entry is None else f"batch_{entry[0].seed}",
        key_name=request.state.identity.key_name,
    )
    return json_response(batch)


async def list_batches(request: Request) -> Response:
    """Answer GET /v1/batches."""
    page = await gateway_of(request).batches.list(
        tenant=request.state.identity.tenant,
        after=request.query_params.get("after"),
        limit=limit_of(request, DEFAULT_LIMIT),
    )
    return json_response(page)


async def retrieve_batch(request: Request) -> Response:
    """Answer GET /v1/batches/{batch_id}."""
    batches, tenant = gateway_of(request).batches, request.state.identity.tenant
    return json_response(await batches.get(request.path_params["batch_id"], tenant=tenant))


async def cancel_batch(request: Request) -> Response:
    """Answer POST /v1/batches/{batch_id}/cancel."""
    batches, tenant = gateway_of(request).batches, request.state.identity.tenant
    return json_response(await batches.cancel(request.path_params["batch_id"], tenant=tenant))


_LIMIT = query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT}, "Maximum number of items.")

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/batches",
        handler=create_batch,
        summary="Create a batch from an uploaded file",
        body=BatchBody,
        response=Batch,
        statuses=(400, 409, 413),
    ),
    Operation(
        method="GET",
        path="/v1/batches",
        handler=list_batches,
        summary="List batches, the newest first",
        response=Page[Batch],
        statuses=(400,),
        parameters=(AFTER, _LIMIT),
    ),
    Operation(
        method="GET",
        path="/v1/batches/{batch_id}",
        handler=retrieve_batch,
        summary="Describe a batch",
        response=Batch,
    ),
    Operation(
        method="POST",
        path="/v1/batches/{batch_id}/cancel",
        handler=cancel_batch,
        summary="Cancel a batch; finished rows are kept",
        response=Batch,
        statuses=(409,),
    ),
)
