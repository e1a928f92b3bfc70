"""/v1/messages/batches: Anthropic's Message Batches, which ``penstock jobs`` runs row by row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ....shared.values.shown import shown
from ...anthropic.batches import (
    BATCHES,
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchBody,
    MessageBatchList,
    failure_of,
    lines_of,
    message_batch,
    problem_error,
    result_line,
)
from ...anthropic.errors import MESSAGES, MessagesError
from ...batches import BatchStore
from ...batches.batch_records import BatchRecord, BatchStatus
from ...batches.batch_store import DEFAULT_LIMIT, MAX_LIMIT
from ...batches.files import Upload
from ...batches.input_rows import InputRows, check_input
from ...openai.errors import OpenAIError, bad_field
from ..http import gateway_of, json_response, read_struct, trace_headers
from ..idempotency import reserve
from ..operations import Operation
from .files import limit_of, query_parameter


async def create(request: Request) -> Response:
    """Answer POST /v1/messages/batches."""
    gateway, body = gateway_of(request), await read_struct(request, MessageBatchBody)
    store, tenant = gateway.batches, request.state.identity.tenant
    if not body.requests:
        raise bad_field("requests", "requests must hold at least one request")
    upload = await store.files.receive(body.lines())
    try:
        await gateway.client.find_model(await _checked_model(store, upload), tenant=tenant)
        entry = await reserve(request)
        seed = None if entry is None else entry[0].seed
        file_id = None if seed is None else f"file-{seed}"
        file = await store.files.keep(upload, filename="requests.jsonl", tenant=tenant, file_id=file_id)
    except BaseException:
        await store.files.discard(upload)
        raise
    batch = await store.create(
        input_file_id=file.id,
        endpoint=MESSAGES,
        tenant=tenant,
        trace_headers=trace_headers(request.headers) or None,
        batch_id=None if seed is None else f"batch_{seed}",
        num_rows=len(body.requests),
        key_name=request.state.identity.key_name,
    )
    return json_response(message_batch(await store.own_record(batch.id, tenant=tenant)))


async def _checked_model(store: BatchStore, upload: Upload) -> str:
    """Return the model of all requests.

    Raises:
        OpenAIError: 400, a batch cannot have these requests.
    """
    checked = await asyncio.to_thread(check_input, store.files.contents.path(upload.file_id), MESSAGES)
    if not isinstance(checked, InputRows):
        raise problem_error(checked[0])
    checked.close()
    return checked.model


async def list_batches(request: Request) -> Response:
    """Answer GET /v1/messages/batches. Batches that were created from files are among them."""
    query, store, tenant = request.query_params, gateway_of(request).batches, request.state.identity.tenant
    before = query.get("before_id")
    if before is not None and "after_id" in query:
        raise bad_field("before_id", "before_id cannot be combined with after_id")
    page = await store.list_records(
        tenant=tenant,
        after=query.get("after_id") if before is None else before,
        limit=limit_of(request, DEFAULT_LIMIT),
        order="desc" if before is None else "asc",
        endpoint=MESSAGES,
    )
    data = [message_batch(record) for record in (page.data if before is None else page.data[::-1])]
    ids = [batch.id for batch in data] or [None]
    return json_response(MessageBatchList(data=data, has_more=page.has_more, first_id=ids[0], last_id=ids[-1]))


async def retrieve(request: Request) -> Response:
    """Answer GET /v1/messages/batches/{batch_id}."""
    return json_response(message_batch(await _record(request)))


async def cancel(request: Request) -> Response:
    """Answer POST /v1/messages/batches/{batch_id}/cancel."""
    tenant = request.state.identity.tenant
    await gateway_of(request).batches.cancel(request.path_params["batch_id"], tenant=tenant)
    return json_response(message_batch(await _record(request)))


async def delete(request: Request) -> Response:
    """Answer DELETE /v1/messages/batches/{batch_id}."""
    record = await _ended(request)
    await gateway_of(request).batches.delete(record)
    return json_response(DeletedMessageBatch(id=record.spec.id))


async def results(request: Request) -> Response:
    """Answer GET /v1/messages/batches/{batch_id}/results."""
    record = await _ended(request)
    if record.batch.status is BatchStatus.FAILED:
        raise failure_of(record)
    return StreamingResponse(_results(gateway_of(request).batches, record), media_type="application/x-jsonl")


async def _results(store: BatchStore, record: BatchRecord) -> AsyncIterator[bytes]:
    for file_id in filter(None, (record.batch.output_file_id, record.batch.error_file_id)):
        async for line in lines_of(store.files.content(file_id, tenant=record.spec.tenant)):
            yield result_line(line)


async def _record(request: Request) -> BatchRecord:
    batches, tenant = gateway_of(request).batches, request.state.identity.tenant
    return await batches.own_record(request.path_params["batch_id"], tenant=tenant)


async def _ended(request: Request) -> BatchRecord:
    record = await _record(request)
    if not record.batch.status.is_end or record.event_is_due:
        message = f"batch {shown(record.spec.id)} has not ended; wait for its end, or cancel it"
        raise OpenAIError(409, message, code="batch_not_ended")
    return record


_LIMIT = query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT}, "Maximum number of items.")
_PATH = f"{BATCHES}/{{batch_id}}"

OPERATIONS = (
    Operation(
        method="POST",
        path=BATCHES,
        handler=create,
        summary="Create a batch of messages, as Anthropic's API",
        body=MessageBatchBody,
        response=MessageBatch,
        error=MessagesError,
        statuses=(400, 409, 413),
    ),
    Operation(
        method="GET",
        path=BATCHES,
        handler=list_batches,
        summary="List batches of messages, the newest first",
        response=MessageBatchList,
        error=MessagesError,
        statuses=(400,),
        parameters=(
            query_parameter("after_id", {"type": "string"}, "The id of a batch; older ones are listed."),
            query_parameter("before_id", {"type": "string"}, "The id of a batch; newer ones are listed."),
            _LIMIT,
        ),
    ),
    Operation(
        method="GET",
        path=_PATH,
        handler=retrieve,
        summary="Describe a batch of messages",
        response=MessageBatch,
        error=MessagesError,
    ),
    Operation(
        method="DELETE",
        path=_PATH,
        handler=delete,
        summary="Delete an ended batch of messages with its files",
        response=DeletedMessageBatch,
        error=MessagesError,
        statuses=(409,),
    ),
    Operation(
        method="POST",
        path=f"{_PATH}/cancel",
        handler=cancel,
        summary="Cancel a batch of messages; finished ones are kept",
        response=MessageBatch,
        error=MessagesError,
        statuses=(409,),
    ),
    Operation(
        method="GET",
        path=f"{_PATH}/results",
        handler=results,
        summary="Return the results of an ended batch of messages",
        media_type="application/x-jsonl",
        error=MessagesError,
        statuses=(400, 409),
    ),
)
