"""Files and batches as in OpenAI's API, and their records in Redis.

Transitions of a batch: validating → in_progress → finalizing → completed | expired, validating | in_progress → failed,
and validating | in_progress → cancelling → cancelled; see the table in ``scripts/lib.lua``.
"""

from __future__ import annotations

import enum
from typing import Any, Generic, TypeVar

import msgspec

from ...shared.errors import ValidationError
from ...shared.messages import WIRE_VERSION
from ...shared.values.checks import check_text
from ...shared.values.shown import shown

MAX_FILE_BYTES = 200 * 1024 * 1024
MAX_ROWS = 50_000
# OpenAI has only "24h".
COMPLETION_WINDOWS_S = {"24h": 24 * 3600, "7d": 7 * 24 * 3600}
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
PURPOSES = ("batch", "batch_output")
# OpenAI's limits of expires_after and output_expires_after; an input file expires after 30 days by default.
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000
MAX_METADATA_PAIRS, MAX_METADATA_KEY_CHARS, MAX_METADATA_VALUE_CHARS = 16, 64, 512

T = TypeVar("T")


class BatchStatus(enum.StrEnum):
    """Status of a batch."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        return self in (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


class FileObject(msgspec.Struct, kw_only=True, frozen=True):
    """OpenAI's file object. Times are Unix seconds by the clock of Redis."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    expires_at: int | None = None
    status: str = "processed"
    status_details: str | None = None


class FileRecord(msgspec.Struct, kw_only=True, frozen=True):
    """Record of a file in Redis: its file object, its tenant, and the digest of its contents.

    Old records must always decode (``tests/unit/batches/test_records.py``), so new fields have a default.
    """

    version: int = WIRE_VERSION
    file: FileObject
    tenant: str
    sha256: str


class Deleted(msgspec.Struct, kw_only=True, frozen=True):
    """The response to a deletion."""

    id: str
    object: str = "file"
    deleted: bool = True


class Page(msgspec.Struct, Generic[T], kw_only=True, frozen=True):
    """A page of a list; ``after=last_id`` requests the next one."""

    data: list[T]
    object: str = "list"
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class RowProblem(msgspec.Struct, kw_only=True, frozen=True):
    """A problem of a line of an input file, counted from 1, or of the whole file if ``line`` is None."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class RowProblems(msgspec.Struct, kw_only=True, frozen=True):
    """All problems of an input file."""

    data: list[RowProblem]
    object: str = "list"


class RequestCounts(msgspec.Struct, kw_only=True, frozen=True):
    """Numbers of rows of a batch: all, answered, and failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Input tokens that were in the KV cache."""

    cached_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Output tokens used for reasoning; not counted separately, so 0."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, kw_only=True, frozen=True):
    """Token counts of all answered rows."""

    input_tokens: int = 0
    input_tokens_details: InputTokensDetails = InputTokensDetails()
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int = 0


class BatchSpec(msgspec.Struct, kw_only=True, frozen=True):
    """The arguments of a batch, which never change.

    Args:
        is_private: the creator runs it, possibly from a folder that no other host has. No other process runs it before
            it expires.
        trace_headers: trace of the creator, which the batch's requests continue.
        num_rows: rows of the input, 0 if they are not counted yet.
        key_name: name of the API key that its requests are counted under.

    Old records must always decode; see ``FileRecord``.
    """

    version: int = WIRE_VERSION
    id: str
    tenant: str
    input_file_id: str
    endpoint: str
    created_at: int
    expires_at: int
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    webhook_url: str | None = None
    is_private: bool = False
    trace_headers: dict[str, str] | None = None
    num_rows: int = 0
    key_name: str = ""


class Batch(msgspec.Struct, kw_only=True, frozen=True):
    """OpenAI's batch object. Times are Unix seconds by the clock of Redis."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    status: BatchStatus
    object: str = "batch"
    model: str | None = None
    errors: RowProblems | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None


class BatchRecord(msgspec.Struct, frozen=True):
    """Record of a batch in Redis.

    ``event_is_due``: its end was not reported yet. ``num_unfinished``: failed rows that had not ended with the batch.
    """

    spec: BatchSpec
    batch: Batch
    event_is_due: bool
    num_unfinished: int = 0


_TIMES = tuple(f"{status}_at" for status in BatchStatus if status is not BatchStatus.VALIDATING)
_spec_decoder = msgspec.json.Decoder(BatchSpec)


def read_batch(fields: dict[str, bytes]) -> BatchRecord:
    """Return the record of a batch from its Redis hash."""
    spec = _spec_decoder.decode(fields["spec"])

    def number(name: str) -> int:
        return int(fields.get(name, 0))

    def text(name: str) -> str | None:
        return fields[name].decode() if fields.get(name) else None

    times: dict[str, Any] = {name: number(name) for name in _TIMES if name in fields}
    batch = Batch(
        id=spec.id,
        endpoint=spec.endpoint,
        input_file_id=spec.input_file_id,
        completion_window=spec.completion_window,
        created_at=spec.created_at,
        expires_at=spec.expires_at,
        metadata=spec.metadata,
        status=BatchStatus(fields["status"].decode()),
        model=text("model"),
        output_file_id=text("output_file_id"),
        error_file_id=text("error_file_id"),
        errors=msgspec.json.decode(fields["errors"], type=RowProblems) if "errors" in fields else None,
        usage=msgspec.json.decode(fields["usage"], type=BatchUsage) if "usage" in fields else None,
        request_counts=RequestCounts(total=number("total"), completed=number("completed"), failed=number("failed")),
        **times,
    )
    return BatchRecord(spec, batch, "event" in fields, number("unfinished"))


def check_metadata(metadata: dict[str, str] | None) -> dict[str, str] | None:
    """Return ``metadata`` if it has at most 16 pairs of short strings.

    Raises:
        ValidationError: it has not.
    """
    if metadata is None:
        return None
    if len(metadata) > MAX_METADATA_PAIRS:
        raise ValidationError(f"metadata must have at most {MAX_METADATA_PAIRS} pairs, got {len(metadata)}")
    for key, value in metadata.items():
        if isinstance(key, str):
            check_text("a key of metadata", key)
        if not isinstance(key, str) or not 1 <= len(key) <= MAX_METADATA_KEY_CHARS:
            raise ValidationError(f"metadata keys must have 1 to {MAX_METADATA_KEY_CHARS} characters, got {shown(key)}")
        if not isinstance(value, str) or len(value) > MAX_METADATA_VALUE_CHARS:
            raise ValidationError(
                f"metadata[{shown(key)}] must be a string of at most {MAX_METADATA_VALUE_CHARS} characters, got "
                f"{shown(value)}"
            )
        check_text(f"metadata[{shown(key)}]", value)
    return metadata


def check_expiry(field: str, seconds: int | None) -> int | None:
    """Return ``seconds`` if a file may expire after this time.

    Raises:
        ValidationError: it is out of range.
    """
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise ValidationError(f"{field} must be {MIN_EXPIRY_S} to {MAX_EXPIRY_S} seconds, got {shown(seconds)}")
    return seconds
