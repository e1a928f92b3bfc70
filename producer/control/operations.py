"""What operators change, with an entry in the audit for each change: commands, client and dashboard all call these."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ...shared.broker import DeadLetter, Queue, RequestFilter
from ...shared.broker.bulk import cancel_matching, purge_parked, replay_parked
from ...shared.connection import CommandConnection
from ...shared.deployment.audit import Audit
from ...shared.errors import RequestNotFoundError
from ...shared.keys import Keys
from ...shared.partitions import Layouts, PartitionedBroker, open_dead_letter, open_history, open_queue
from ...shared.queue.policy import QueuePolicy, TenantPolicy
from ...shared.queue.request_state import RequestState
from ...shared.values.shown import shown
from ..agenda import Agenda
from ..webhooks.event_store import EventStore


class Operations:
    """Changes of one deployment. Each writes what was done, by whom and with what result, also if it fails.

    All methods raise what the call below them raises, and ``RedisUnavailableError`` when Redis stays away for longer
    than the connection retries.
    """

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._layouts = Layouts(connection, keys)
        self.audit = Audit(connection, keys)

    async def pause(self, model: str, *, put_back: bool, abort: bool = False) -> int:
        """As ``Queue.pause``."""
        mode = "abort" if abort else "put back" if put_back else "run on"
        async with self.audit.audited("queue.pause", model, running=mode):
            return await (await self._queue(model)).pause(put_back=put_back, abort=abort)

    async def resume(self, model: str) -> bool:
        """As ``Queue.resume``."""
        async with self.audit.audited("queue.resume", model):
            return await (await self._queue(model)).resume()

    async def purge(self, model: str, tenant: str, band: str = "") -> int:
        """As ``Queue.purge``."""
        async with self.audit.audited("queue.purge", model, tenant=tenant, band=band) as told:
            told["cancelled"] = count = await (await self._queue(model)).purge(tenant, band)
            return count

    async def configure(self, model: str, policy: QueuePolicy) -> None:
        """As ``Queue.configure``."""
        async with self.audit.audited("queue.configure", model, policy=policy.encode().decode()):
            await (await self._queue(model)).configure(policy)

    async def configure_tenant(self, model: str, tenant: str, policy: TenantPolicy | None) -> None:
        """As ``Queue.configure_tenant``."""
        text = "the queue's" if policy is None else policy.encode().decode()
        async with self.audit.audited("queue.configure_tenant", model, tenant=tenant, policy=text):
            await (await self._queue(model)).configure_tenant(tenant, policy)

    async def cancel(self, model: str, request_id: str) -> RequestState:
        """End a request and return the state that it is in then.

        Raises:
            RequestNotFoundError: it is unknown, or its result has expired.
        """
        async with self.audit.audited("request.cancel", request_id, model=model):
            state = await PartitionedBroker(self._connection, self._keys, model, self._layouts).cancel(request_id)
            if state is None:
                raise RequestNotFoundError(
                    f"request {shown(request_id)} of model {shown(model)} is unknown or has expired"
                )
            return state

    async def replay_dead(self, model: str, request_id: str) -> bool:
        """As ``DeadLetter.replay``."""
        async with self.audit.audited("dead.replay", request_id, model=model) as told:
            told["found"] = was_parked = await (await self._dead(model)).replay(request_id)
            return was_parked

    async def purge_dead(self, model: str, request_id: str) -> bool:
        """As ``DeadLetter.purge``."""
        async with self.audit.audited("dead.purge", request_id, model=model) as told:
            told["found"] = was_parked = await (await self._dead(model)).purge(request_id)
            return was_parked

    async def replay_all_dead(self, model: str, request_ids: Iterable[str] | None = None) -> int:
        """As ``replay_parked``."""
        async with self.audit.audited("dead.replay_all", model) as told:
            told["replayed"] = count = await replay_parked(await self._dead(model), request_ids)
            return count

    async def purge_all_dead(self, model: str, request_ids: Iterable[str] | None = None) -> int:
        """As ``purge_parked``."""
        async with self.audit.audited("dead.purge_all", model) as told:
            told["purged"] = count = await purge_parked(await self._dead(model), request_ids)
            return count

    async def cancel_matching(self, model: str, wanted: RequestFilter) -> int:
        """As ``cancel_matching`` of the broker.

        Raises:
            ValidationError: ``wanted`` names only states that are ends.
        """
        async with self.audit.audited("request.cancel_all", model, filter=msgspec.json.encode(wanted).decode()) as told:
            history = await open_history(self._connection, self._keys, model)
            told["cancelled"] = count = await cancel_matching(history, wanted)
            return count

    async def replay_webhook(self, event_id: str) -> None:
        """As ``EventStore.replay``."""
        async with self.audit.audited("webhook.replay", event_id):
            await self._events().replay(event_id)

    async def purge_webhook(self, event_id: str) -> bool:
        """As ``EventStore.purge``."""
        async with self.audit.audited("webhook.purge", event_id) as told:
            told["found"] = was_known = await self._events().purge(event_id)
            return was_known

    async def _queue(self, model: str) -> Queue:
        return await open_queue(self._connection, self._keys, model)

    async def _dead(self, model: str) -> DeadLetter:
        return await open_dead_letter(self._connection, self._keys, model)

    def _events(self) -> EventStore:
        return EventStore(self._connection, self._keys, Agenda(self._connection, self._keys))
