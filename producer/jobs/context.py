"""Collaborators of all jobs, and the run of a job that holds an item of the agenda.

A long job runs in slices, each a separate arq job, so that arq's timeouts can be short. arq counts the jobs of a dead
process as running until the longest timeout has passed, including an app's own functions in the same worker. A job must
survive kill -9 anyway, so ending a slice costs only the restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from ...shared.deployment.presence import Presence, ProcessKind
from ...shared.errors import ConfigurationError
from ...shared.process.log import get_logger
from ...shared.shards import make_commands
from ...shared.tracing.tracing import Tracing
from ..background.agenda import Agenda, Hold
from ..background.concurrency import TenantSlots
from ..batches import ROW_RESULT_TTL_S, BatchStore
from ..client import Client
from ..webhooks.delivery import Delivery
from ..webhooks.event_store import EventStore
from ..webhooks.outbox import Outbox
from ..webhooks.targets import WebhookTargets
from .settings import JobSettings

CONTEXT_KEY = "penstock"

SLICE_S = 240.0
T = TypeVar("T")
log = get_logger(__name__)


class JobContext:
    """A client, a connection for commands, and the services that use them; ``from_ctx(ctx)`` gets it from arq's
    ``ctx``."""

    def __init__(self, settings: JobSettings, tracing: Tracing) -> None:
        self.settings = settings
        self.keys = settings.keys
        # Jobs wait for Redis as long as it is away, since they have no caller.
        self.connection = make_commands(settings.redis_url, settings.shards, self.keys, retry_for_s=float("inf"))
        self._tracing = tracing
        self.client = Client(
            settings.redis_url,
            model=settings.model,
            tenant=settings.tenant,
            result_ttl_s=settings.result_ttl_s,
            retry_for_s=float("inf"),
            namespace=settings.namespace,
            shards=settings.shards,
            tracer_provider=tracing.provider,
        )
        self.agenda = Agenda(self.connection, self.keys, lease_ttl_s=settings.lease_ttl_s)
        # The results only wait for a runner, and there are many of them.
        self.batch_client = Client(
            settings.redis_url,
            result_ttl_s=ROW_RESULT_TTL_S,
            retry_for_s=float("inf"),
            namespace=settings.namespace,
            shards=settings.shards,
            tracer_provider=tracing.provider,
        )
        self.batches = BatchStore(
            settings.redis_url, settings.files_dir, retry_for_s=float("inf"), namespace=settings.namespace
        )
        # Batches use at most half of the slots, because each occupies its slot for long.
        self.batch_slots = TenantSlots(settings.max_jobs // 2, settings.max_jobs)
        self.events = EventStore(self.connection, self.keys, self.agenda)
        # Ids of the events of budgets that this process has created.
        self.budget_events: set[str] = set()
        self.outbox = Outbox(self.connection, self.keys, self.events)
        self.delivery = Delivery(self.connection, self.keys, self.events, settings.webhooks, settings.max_jobs)
        self._presence = Presence(self.connection, self.keys, ProcessKind.JOBS, {"queue": settings.queue})

    @classmethod
    def from_ctx(cls, ctx: dict[str, Any]) -> JobContext:
        """Return the context of this arq worker.

        Raises:
            ConfigurationError: the worker was started without ``JobSet.on_startup``.
        """
        context = ctx.get(CONTEXT_KEY)
        if not isinstance(context, cls):
            raise ConfigurationError(
                "the arq worker has Penstock's functions but did not run its on_startup; set on_startup in its "
                "WorkerSettings, or await it in your on_startup"
            )
        return context

    async def open(self) -> None:
        """Connect.

        Raises:
            ConfigurationError: Redis is unreachable or unusable.
        """
        await self.client.open()
        await self.batch_client.open()
        await self.batches.open()
        await self.connection.open()
        await WebhookTargets(self.connection, self.keys).publish(self.settings.webhooks.allowed_networks)
        self._presence.start()

    async def close(self) -> None:
        """Disconnect. The second call has no effect."""
        await self._presence.leave()
        await self.client.close()
        await self.batch_client.close()
        await self.batches.close()
        await self.delivery.close()
        await self.outbox.close()
        await self.connection.close()
        await self._tracing.close()


class CutOffError(Exception):
    """The slice ended, or the hold was lost; the job must be run again, here or elsewhere."""


async def run_held(hold: Hold, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` for at most one slice, while the hold lasts.

    Raises:
        CutOffError: the work did not end, and was cancelled.
    """
    body, renewal = asyncio.create_task(work), asyncio.create_task(hold.keep())
    try:
        await asyncio.wait({body, renewal}, timeout=SLICE_S, return_when=asyncio.FIRST_COMPLETED)
        if renewal.done() and not body.done():
            log.warning("job_hold_lost", item=hold.item, why="this process was stopped or disconnected for too long")
    finally:
        body.cancel()
        renewal.cancel()
        await asyncio.gather(body, renewal, return_exceptions=True)
    if body.cancelled():
        raise CutOffError(hold.item)
    return body.result()
