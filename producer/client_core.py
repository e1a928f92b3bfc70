"""Base class of all parts of the client: its connections, and how they find models, queues and engines."""

from __future__ import annotations

from ..shared.broker import Queue
from ..shared.connection import CommandConnection, Subscriber
from ..shared.control.calls import Utility
from ..shared.deployment.records import ModelCard
from ..shared.keys import Keys
from ..shared.partitions import open_queue
from .control.operations import Operations
from .engine_calls import A, CallOptions, CallRound
from .lora.resolver import AdapterResolver
from .requests.health import Health, HealthWatch
from .requests.request_builder import RequestBuilder
from .requests.single_requests import SingleRequests


class ClientCore:
    """The base of each part of ``Client``.

    Args:
        commands, subscriber: the client's two connections.
        keys: the keys of its namespace.
        requests: enqueues and follows requests.
        builder: builds requests from a caller's arguments.
        adapters: resolves the adapters that a caller names.
        health: the known state of engines.
    """

    def __init__(
        self,
        commands: CommandConnection,
        subscriber: Subscriber,
        keys: Keys,
        requests: SingleRequests,
        builder: RequestBuilder,
        adapters: AdapterResolver,
        health: Health,
    ) -> None:
        self._commands = commands
        self._subscriber = subscriber
        self._keys = keys
        self._requests = requests
        self._builder = builder
        self._adapters = adapters
        self._health = health
        self._health_watch = HealthWatch(health)
        self._operations = Operations(commands, keys)

    async def _card(self, model: str | None) -> ModelCard:
        """Return the card of a model; the model may be left out as for a request."""
        return await self._builder.card(model)

    async def _queue(self, model: str | None) -> Queue:
        """Return the queue of a model."""
        return await open_queue(self._commands, self._keys, (await self._card(model)).model)

    async def _call_engines(self, call: Utility, kind: type[A], options: CallOptions) -> dict[str, A]:
        """Send ``call`` and return the engines' answers, of type ``kind``, by engine id."""
        card = await self._card(options.get("model"))
        return await CallRound(self._commands, self._subscriber, self._keys, card.model, call, kind).run(options)
