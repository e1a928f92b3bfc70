"""Span of an enqueue call: a child of the spans of gateways and apps, and the parent of engines' spans."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from ..queue_entry import Outgoing


class EnqueueSpans:
    """No spans, for a client without tracing. Requests keep the ``trace_headers`` of their caller."""

    async def open(self) -> None:
        """Begin exporting, when the client connects."""

    async def close(self) -> None:
        """Export the remaining spans, for a short time at most. A second call does nothing."""

    def around(self, outgoing: Sequence[Outgoing]) -> AbstractContextManager[None]:
        """Return a context for the call that enqueues these requests. It sets the headers for engines' spans."""
        return nullcontext()
