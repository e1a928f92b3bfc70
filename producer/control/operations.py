"""The changes that operators make, each with an audit entry. Used by the commands, the client and the dashboard."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from ...shared.broker import DeadLetter, Queue, RequestFilter
from ...shared.broker.bulk import AT_ONCE, cancel_matching, purge_parked, replay_parked
from ...shared.connection import CommandConnection
from ...shared.deployment.audit import Audit
from ...shared.errors import ConfigurationError, RequestNotFoundError
from ...shared.keys import Keys
from ...shared.partitions import Layouts, PartitionedBroker, open_dead_letter, open_history, open_queue
from ...shared.partitions.budgets import BudgetStore
from ...shared.queue.budgets import PERIOD_WORDS, Budget
from ...shared.queue.lifecycle import RequestState
from ...shared.queue.policy import QueuePolicy, TenantPolicy
from ...shared.values.shown import shown
from ..background.agenda import Agenda
from ..webhooks.addresses import check_url
from ..webhooks.event_store import EventStore
from ..webhooks.events import WebhookTarget
from ..webhooks.targets import WebhookTargets

P = TypeVar("P", QueuePolicy, TenantPolicy)


class Operations:
    """Changes to one deployment. Each writes an audit entry with the change, its author and its result, also on
    failure.

    All methods raise the errors of the call that they wrap, and ``RedisUnavailableError`` if Redis is unreachable for
    longer than the connection retries.
    """

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._layouts = Layouts(connection, keys)
        self.audit = Audit(connection, keys)

    async def pause(self, model: str, *, put_back: bool, abort: bool = False) -> int:
        """Pause a queue; see ``Queue.pause``."""
        mode = "aborted" if abort else "requeued" if put_back else "kept"
        async with self.audit.audited("queue.pause", model, running_requests=mode):
            return await (await self._queue(model)).pause(put_back=put_back, abort=abort)

    async def resume(self, model: str) -> bool:
        """Resume a queue; see ``Queue.resume``."""
        async with self.audit.audited("queue.resume", model):
            return await (await self._queue(model)).resume()

    async def purge(self, model: str, tenant: str, band: str = "") -> int:
        """Cancel a tenant's waiting requests; see ``Queue.purge``."""
        async with self.audit.audited("queue.purge", model, tenant=tenant, band=band) as details:
            details["cancelled"] = count = await (await self._queue(model)).purge(tenant, band)
            return count

    async def configure(self, model: str, policy: QueuePolicy) -> None:
        """Set a queue's policy; see ``Queue.configure``."""
        async with self.audit.audited("queue.configure", model) as details:
            queue = await self._queue(model)
            details |= await _policy_changes(queue.policy, policy)
            await queue.configure(policy)

    async def set_budget(self, budget: Budget) -> None:
        """Set a budget; see ``BudgetStore.set_budget``.

        Raises:
            ValidationError: a value is invalid, or the tenant's webhooks may not have the URL.
        """
        store = BudgetStore(self._connection, self._keys)
        async with self.audit.audited("budget.set", budget.tenant, key=budget.key_name) as details:
            if budget.webhook_url:
                target = WebhookTarget(url=check_url(budget.webhook_url), tenant=budget.tenant)
                await WebhookTargets(self._connection, self._keys).admit(target)
            former = next((one for one in await store.read_all() if one.name == budget.name), None)
            limit = _budget_words(budget)
            details["limit"] = limit if former is None else f"{_budget_words(former)} → {limit}"
            await store.set_budget(budget)

    async def remove_budget(self, budget: Budget) -> bool:
        """Remove a budget by its tenant, key and period; see ``BudgetStore.remove_budget``."""
        details = {"key": budget.key_name, "period": budget.period}
        async with self.audit.audited("budget.remove", budget.tenant, **details) as details:
            details["found"] = existed = await BudgetStore(self._connection, self._keys).remove_budget(budget.name)
            return existed

    async def configure_tenant(self, model: str, tenant: str, policy: TenantPolicy | None) -> None:
        """Set a tenant's policy; see ``Queue.configure_tenant``."""
        async with self.audit.audited("queue.configure_tenant", model, tenant=tenant) as details:
            queue = await self._queue(model)

            async def effective_policy() -> TenantPolicy:
                return await queue.tenant_policy(tenant) or (await queue.policy()).tenant

            details |= {"policy": "the queue's"} if policy is None else await _policy_changes(effective_policy, policy)
            await queue.configure_tenant(tenant, policy)

    async def cancel(self, model: str, request_id: str) -> RequestState:
        """End a request, and return the state that it then is in.

        Raises:
            RequestNotFoundError: the request is unknown, or its result has expired.
        """
        async with self.audit.audited("request.cancel", request_id, model=model):
            state = await PartitionedBroker(self._connection, self._keys, model, self._layouts).cancel(request_id)
            if state is None:
                raise RequestNotFoundError(
                    f"request {shown(request_id)} of model {shown(model)} is unknown or has expired"
                )
            return state

    async def retry(self, model: str, request_id: str) -> None:
        """Queue a request again that failed, was cancelled or expired; see ``Broker.retry``.

        Raises:
            RequestNotFoundError: it has not ended so, its result has expired, or its input is not retained.
        """
        async with self.audit.audited("request.retry", request_id, model=model):
            if not await PartitionedBroker(self._connection, self._keys, model, self._layouts).retry(request_id):
                raise RequestNotFoundError(
                    f"request {shown(request_id)} of model {shown(model)} cannot be retried: it has not failed, been "
                    "cancelled or expired, or its input is no longer stored; send it again"
                )

    async def retry_all(self, model: str, request_ids: Sequence[str]) -> int:
        """Retry many requests, and return how many were queued: those whose input is retained."""
        broker = PartitionedBroker(self._connection, self._keys, model, self._layouts)
        async with self.audit.audited("request.retry_all", model) as details:
            parts = [request_ids[start : start + AT_ONCE] for start in range(0, len(request_ids), AT_ONCE)]
            details["retried"] = count = sum([sum(await asyncio.gather(*map(broker.retry, ids))) for ids in parts])
            return count

    async def replay_dead(self, model: str, request_id: str) -> bool:
        """Requeue a parked request; see ``DeadLetter.replay``."""
        async with self.audit.audited("dead.replay", request_id, model=model) as details:
            details["found"] = was_parked = await (await self._dead(model)).replay(request_id)
            return was_parked

    async def purge_dead(self, model: str, request_id: str) -> bool:
        """Delete a parked request; see ``DeadLetter.purge``."""
        async with self.audit.audited("dead.purge", request_id, model=model) as details:
            details["found"] = was_parked = await (await self._dead(model)).purge(request_id)
            return was_parked

    async def replay_all_dead(self, model: str, request_ids: Iterable[str] | None = None) -> int:
        """Requeue many parked requests; see ``replay_parked``."""
        async with self.audit.audited("dead.replay_all", model) as details:
            details["replayed"] = count = await replay_parked(await self._dead(model), request_ids)
            return count

    async def purge_all_dead(self, model: str, request_ids: Iterable[str] | None = None) -> int:
        """Delete many parked requests; see ``purge_parked``."""
        async with self.audit.audited("dead.purge_all", model) as details:
            details["purged"] = count = await purge_parked(await self._dead(model), request_ids)
            return count

    async def cancel_matching(self, model: str, matching: RequestFilter) -> int:
        """Cancel all requests that match; see ``cancel_matching`` of the broker.

        Raises:
            ValidationError: ``matching`` names only final states.
        """
        filter_json = msgspec.json.encode(matching).decode()
        async with self.audit.audited("request.cancel_all", model, filter=filter_json) as details:
            history = await open_history(self._connection, self._keys, model)
            details["cancelled"] = count = await cancel_matching(history, matching)
            return count

    async def replay_webhook(self, event_id: str) -> None:
        """Deliver an event again; see ``EventStore.replay``."""
        async with self.audit.audited("webhook.replay", event_id):
            await self._events().replay(event_id)

    async def purge_webhook(self, event_id: str) -> bool:
        """Delete an event; see ``EventStore.purge``."""
        async with self.audit.audited("webhook.purge", event_id) as details:
            details["found"] = was_known = await self._events().purge(event_id)
            return was_known

    async def _queue(self, model: str) -> Queue:
        return await open_queue(self._connection, self._keys, model)

    async def _dead(self, model: str) -> DeadLetter:
        return await open_dead_letter(self._connection, self._keys, model)

    def _events(self) -> EventStore:
        return EventStore(self._connection, self._keys, Agenda(self._connection, self._keys))


def _budget_words(budget: Budget) -> str:
    return f"{budget.limit:,.10g} {budget.unit} {PERIOD_WORDS[budget.period]}"


async def _policy_changes(read: Callable[[], Awaitable[P]], after: P) -> dict[str, str]:
    """Return the fields of a policy that change, with the value before and after."""
    try:
        before = await read()
    except ConfigurationError:
        return {"policy": after.encode().decode()}  # the former one is unreadable
    old, new = _policy_fields(before), _policy_fields(after)
    return {name: f"{old[name]} → {value}" for name, value in new.items() if value != old[name]}


def _policy_fields(policy: QueuePolicy | TenantPolicy) -> dict[str, str]:
    fields = msgspec.json.decode(policy.encode())
    fields |= {f"tenant {name}": value for name, value in fields.pop("tenant", {}).items()}
    return {name: _policy_value(value) for name, value in fields.items()}


def _policy_value(value: Any) -> str:
    return "none" if value is None else " ".join(value) if isinstance(value, list) else str(value)
