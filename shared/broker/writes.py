"""Records that engines write under their claims, and their conversion to arguments of the scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import BrokerError
from ..messages.deltas import Delta
from ..messages.outcome import FinishReason, Usage
from ..queue.lifecycle import RequestState

# Verdicts of append and finish.
REFUSED, WRITTEN, REPEATED = 0, 1, 2

# Number of arguments per record; the first three are request, epoch and the index of its first token.
NUM_WRITE_ARGS = {"append": 6, "finish": 8, "end_segment": 8}

STATE_OF = {
    FinishReason.ERROR: RequestState.FAILED,
    FinishReason.CANCELLED: RequestState.CANCELLED,
    FinishReason.EXPIRED: RequestState.EXPIRED,
    FinishReason.POISONED: RequestState.PARKED,
}

_encoder = msgspec.msgpack.Encoder()


class Record(msgspec.Struct, gc=False):
    """A delta to append under a claim's epoch."""

    request_id: str
    epoch: int
    delta: Delta


class FinalRecord(Record, gc=False):
    """The last delta of a request; it carries ``finish_reason``."""


class SegmentRecord(Record, gc=False):
    """The last delta of a resumable request's segment; it carries the segment's end and ``usage``."""


def append_args(record: Record) -> tuple[str, int, int, int, bytes, str]:
    delta = record.delta
    used = _used(delta.prompt_usage)
    return record.request_id, record.epoch, delta.index, delta.next_index, _encoder.encode(delta), used


def record_args(record: Record) -> tuple[str, int, int, int, bytes]:
    delta = record.delta
    return record.request_id, record.epoch, delta.index, len(delta.token_ids), _encoder.encode(delta)


def final_args(record: FinalRecord) -> list[Any]:
    reason, usage = record.delta.finish_reason, record.delta.usage
    if reason is None:
        raise BrokerError(f"request {record.request_id}: the last delta must carry a finish_reason")
    error = record.delta.error
    cause = reason if error is None else error.code
    used = _used(usage, is_pooled=record.delta.pooled is not None)
    return [*record_args(record), STATE_OF.get(reason, RequestState.FINISHED), used, cause]


def segment_args(record: SegmentRecord) -> list[Any]:
    delta = record.delta
    if not delta.segment_ends or delta.usage is None:
        raise BrokerError(f"request {record.request_id}: the delta must carry the segment's end and usage")
    end = delta.segment_ends[-1]
    ending = Delta(
        index=delta.next_index, finish_reason=end.finish_reason, stop_reason=end.stop_reason, usage=delta.usage
    )
    return [*record_args(record), end.number, _used(delta.usage), _encoder.encode(ending)]


def _used(usage: Usage | None, *, is_pooled: bool = False) -> str:
    """Return the prompt's part of a usage as the ledger reads it; empty if it is unknown."""
    if usage is None:
        return ""
    return f"{usage.num_prompt_tokens} {usage.num_cached_tokens}{'e' if is_pooled else ''}"


def refused_ids(records: Sequence[Record], verdicts: list[int]) -> list[str]:
    return [record.request_id for record, verdict in zip(records, verdicts, strict=True) if verdict == REFUSED]
