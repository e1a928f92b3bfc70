"""Anthropic's Message Batches: another form of the batches that run files of requests (``producer/batches``)."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, Literal

import msgspec

from ..batches.batch_records import BatchRecord, BatchStatus, RowProblem
from ..openai.errors import OpenAIError, bad_field
from .errors import MESSAGES

BATCHES = f"{MESSAGES}/batches"
_UNFINISHED = {"batch_cancelled": "canceled", "batch_expired": "expired"}


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request of a batch. ``params`` is a body of ``MESSAGES``."""

    custom_id: str
    params: dict[str, Any]


class MessageBatchBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The request that creates a batch."""

    requests: list[BatchRequest]

    async def lines(self) -> AsyncIterator[bytes]:
        """Iterate over the lines of the equivalent file of requests."""
        for request in self.requests:
            row = {"custom_id": request.custom_id, "method": "POST", "url": MESSAGES, "body": request.params}
            yield msgspec.json.encode(row) + b"\n"


class RequestCounts(msgspec.Struct, kw_only=True):
    """Numbers of requests. All are ``processing`` until the batch has ended."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(msgspec.Struct, kw_only=True):
    """A batch. Its times are RFC 3339. ``results_url`` is a path of the same server; null if the batch has not ended,
    or if its input could not be run.
    """

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: RequestCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None = None
    results_url: str | None


class MessageBatchList(msgspec.Struct, kw_only=True):
    """A page of batches."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(msgspec.Struct, kw_only=True):
    """The response to a deletion."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str


class _Line(msgspec.Struct):
    """A line of the output or error file of a batch."""

    custom_id: str
    response: _Response | None = None
    error: _Error | None = None


_line_decoder = msgspec.json.Decoder(_Line)


def rfc3339(time_s: float) -> str:
    """Return a Unix time in the form that Anthropic's API has."""
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).isoformat().replace("+00:00", "Z")


def message_batch(record: BatchRecord) -> MessageBatch:
    """Return a batch in Anthropic's form."""
    batch, status = record.batch, record.batch.status
    has_ended = status.is_end
    ended_at = getattr(batch, f"{status}_at") if has_ended else None
    return MessageBatch(
        id=batch.id,
        processing_status="ended" if has_ended else "canceling" if status is BatchStatus.CANCELLING else "in_progress",
        request_counts=_counts(record),
        created_at=rfc3339(batch.created_at),
        expires_at=rfc3339(record.spec.expires_at),
        ended_at=None if ended_at is None else rfc3339(ended_at),
        cancel_initiated_at=None if batch.cancelling_at is None else rfc3339(batch.cancelling_at),
        results_url=f"{BATCHES}/{batch.id}/results" if has_ended and status is not BatchStatus.FAILED else None,
    )


def _counts(record: BatchRecord) -> RequestCounts:
    batch, status = record.batch, record.batch.status
    counts = batch.request_counts
    num_requests = counts.total or record.spec.num_rows
    if not status.is_end:
        return RequestCounts(processing=num_requests)
    if status is BatchStatus.FAILED:
        return RequestCounts(errored=num_requests)
    unfinished = "canceled" if status is BatchStatus.CANCELLED else "expired"
    return RequestCounts(
        succeeded=counts.completed,
        errored=counts.failed - record.num_unfinished,
        **{unfinished: record.num_unfinished},
    )


def failure_of(record: BatchRecord) -> OpenAIError:
    """Return the error of a batch that has no results, because its input could not be run."""
    problems = [] if record.batch.errors is None else [problem.message for problem in record.batch.errors.data]
    return OpenAIError(400, f"the batch could not be run: {'; '.join(problems)}", code="batch_failed")


def problem_error(problem: RowProblem) -> OpenAIError:
    """Return the error of a request that a batch cannot have."""
    if problem.line is None or problem.param is None:
        return bad_field("requests", f"requests: {problem.message}", code=problem.code)
    field = problem.param.replace("body", "params", 1)
    path = f"requests[{problem.line - 1}].{field}"
    return bad_field(path, problem.message.replace(problem.param, path, 1), code=problem.code)


def result_line(line: bytes) -> bytes:
    """Return a line of the output or error file of a batch as a line of its results."""
    row = _line_decoder.decode(line)
    if row.response is None:
        assert row.error is not None
        result: dict[str, Any] = {"type": _UNFINISHED[row.error.code]}
    elif row.response.status_code == 200:
        result = {"type": "succeeded", "message": row.response.body}
    else:
        result = {"type": "errored", "error": row.response.body}
    return msgspec.json.encode({"custom_id": row.custom_id, "result": result}) + b"\n"


async def lines_of(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Iterate over the lines of a file."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest
