"""What every job has at hand; opened when the process starts, closed when it ends."""

from __future__ import annotations

from typing import Any

from ...shared.deployment.presence import Presence, ProcessKind
from ...shared.errors import ConfigurationError
from ...shared.shards import make_commands
from ...shared.tracing.tracing import Tracing
from ..agenda import Agenda
from ..batches import ROW_RESULT_TTL_S, BatchStore
from ..client import Client
from ..places import Places
from ..webhooks.delivery import Delivery
from ..webhooks.event_store import EventStore
from ..webhooks.outbox import Outbox
from ..webhooks.targets import WebhookTargets
from .settings import JobSettings

CONTEXT_KEY = "penstock"


class JobContext:
    """A client, a connection of commands, and what works with it; ``of(ctx)`` finds it in arq's ``ctx``."""

    def __init__(self, settings: JobSettings, tracing: Tracing) -> None:
        self.settings = settings
        self.keys = settings.keys
        # Jobs wait for a Redis that is away as long as it takes: they have nobody to tell.
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
        # Its results wait for a runner only, and there are many of them.
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
        # A batch holds its place for long, so batches have half of the places.
        self.batch_places = Places(settings.max_jobs // 2, settings.max_jobs)
        events = EventStore(self.connection, self.keys, self.agenda)
        self.outbox = Outbox(self.connection, self.keys, events)
        self.delivery = Delivery(self.connection, self.keys, events, settings.webhooks, settings.max_jobs)
        self._presence = Presence(self.connection, self.keys, ProcessKind.JOBS, {"queue": settings.queue})

    @classmethod
    def of(cls, ctx: dict[str, Any]) -> JobContext:
        """Return the one of this arq worker.

        Raises:
            ConfigurationError: the worker was started without our ``on_startup``.
        """
        context = ctx.get(CONTEXT_KEY)
        if not isinstance(context, cls):
            raise ConfigurationError(
                "the arq worker has Penstock's functions but did not run its on_startup; set on_startup in its "
                "WorkerSettings, or await it in your own"
            )
        return context

    async def open(self) -> None:
        """Connect.

        Raises:
            ConfigurationError: Redis cannot be reached or used.
        """
        await self.client.open()
        await self.batch_client.open()
        await self.batches.open()
        await self.connection.open()
        await WebhookTargets(self.connection, self.keys).publish(self.settings.webhooks.allowed_networks)
        self._presence.start()

    async def close(self) -> None:
        """Disconnect; doing it twice does nothing."""
        await self._presence.leave()
        await self.client.close()
        await self.batch_client.close()
        await self.batches.close()
        await self.delivery.close()
        await self.outbox.close()
        await self.connection.close()
        await self._tracing.close()
