"""The span of an enqueue call, which the spans of gateways and apps lead to, and those of engines come from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from ..queue_entry import Outgoing


class EnqueueSpans:
    """None: what a client has that was told of no tracing. Requests keep the ``trace_headers`` of their caller."""

    async def open(self) -> None:
        """Begin; the client connects."""

    async def close(self) -> None:
        """Send what there is, within moments. Doing it twice does nothing."""

    def around(self, outgoing: Sequence[Outgoing]) -> AbstractContextManager[None]:
        """Stand around the call that enqueues these requests. Inside, they have the headers that engines go on from."""
        return nullcontext()
