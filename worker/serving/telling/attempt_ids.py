"""Ids of attempts that any engine can reckon: the next one links to the last, also if that could not tell of itself."""

from __future__ import annotations

import hashlib

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator


class AttemptIds(RandomIdGenerator):
    """Random ids, but for what was chosen for the next span. Of one thread."""

    def __init__(self) -> None:
        self._trace_id = self._span_id = 0

    def choose(self, *, trace_id: int, span_id: int = 0) -> None:
        """Give the next span these ids; the first only if it has no parent, the second unless it is 0."""
        self._trace_id, self._span_id = trace_id, span_id

    def generate_trace_id(self) -> int:
        return self._trace_id or super().generate_trace_id()

    def generate_span_id(self) -> int:
        chosen, self._span_id = self._span_id, 0
        return chosen or super().generate_span_id()


def trace_id_of(model: str, request_id: str) -> int:
    """Return the trace of a request that came without one."""
    return _digest(f"{model} {request_id}", 16)


def span_id_of(trace_id: int, request_id: str, epoch: int) -> int:
    """Return the span of an attempt."""
    return _digest(f"{trace_id:032x} {request_id} {epoch}", 8)


def _digest(text: str, num_bytes: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=num_bytes).digest()) or 1
