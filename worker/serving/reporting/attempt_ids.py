"""Span ids of attempts that any engine can compute, so an attempt links to the previous one even if that sent none."""

from __future__ import annotations

import hashlib

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator


class AttemptIds(RandomIdGenerator):
    """Generator of random ids, except for ids chosen for the next span. Use it in one thread only."""

    def __init__(self) -> None:
        self._trace_id = self._span_id = 0

    def choose(self, *, trace_id: int, span_id: int = 0) -> None:
        """Set the ids of the next span: the trace id if it has no parent, the span id unless it is 0."""
        self._trace_id, self._span_id = trace_id, span_id

    def generate_trace_id(self) -> int:
        return self._trace_id or super().generate_trace_id()

    def generate_span_id(self) -> int:
        chosen, self._span_id = self._span_id, 0
        return chosen or super().generate_span_id()


def trace_id_of(model: str, request_id: str) -> int:
    """Return the trace id of a request that has no trace context."""
    return _digest(f"{model} {request_id}", 16)


def span_id_of(trace_id: int, request_id: str, epoch: int) -> int:
    """Return the span id of an attempt."""
    return _digest(f"{trace_id:032x} {request_id} {epoch}", 8)


def _digest(text: str, num_bytes: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=num_bytes).digest()) or 1
