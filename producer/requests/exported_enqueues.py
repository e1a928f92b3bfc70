"""Spans of enqueue calls that the client itself exports."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager

from opentelemetry.sdk.trace import TracerProvider

from ...shared.tracing.provider import close_provider, open_provider
from .enqueuer import EnqueueSpans
from .queue_entry import Outgoing
from .traced_enqueues import TracedEnqueues


class ExportedEnqueues(EnqueueSpans):
    """Spans of a private provider, which exports to ``endpoint`` while the client is open."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._provider: TracerProvider | None = None
        self._traced = EnqueueSpans()

    async def open(self) -> None:
        if self._provider is None:
            # In a thread, because it queries the host's identity and blocks.
            self._provider = await asyncio.to_thread(open_provider, self._endpoint, service="penstock-client")
            self._traced = TracedEnqueues(self._provider)

    async def close(self) -> None:
        provider, self._provider = self._provider, None
        self._traced = EnqueueSpans()
        if provider is not None:
            await close_provider(provider)

    def around(self, outgoing: Sequence[Outgoing]) -> AbstractContextManager[None]:
        return self._traced.around(outgoing)
