"""The changes that operators make, each with an audit entry. Used by the commands, the client and the dashboard."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from ...shared.broker import DeadLetter, Queue, RequestFilter
from ...shared.broker.bulk import cancel_matching, purge_parked, replay_parked, retry_matching
from ...shared.connection import CommandConnection
from ...shared.deployment.audit import Audit, change_words
from ...shared.deployment.orders import check_worker, make_leave, order_scale, scale_words, scale_worker, send_to_worker
from ...shared.errors import ConfigurationError, RequestNotFoundError
from ...shared.keys import Keys
from ...shared.messages.supervision import DrainCommand, StopCommand, WorkerCommand
from ...shared.partitions import Layouts, PartitionedBroker, open_dead_letter, open_history, open_queue
from ...shared.partitions.budgets import BudgetStore
from ...shared.queue.budgets import PERIOD_WORDS, Budget, Period
from ...shared.queue.lifecycle import RequestState
from ...shared.queue.policy import QueuePolicy, TenantPolicy
from ...shared.values.shown import format_number, shown
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

        One of "all" counts from now on, or from when its former limit was set first.

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
            details["limit"] = limit if former is None else change_words(_budget_words(former), limit)
            if budget.period is Period.ALL:
                now = int((await self._connection.execute("TIME"))[0])
                budget = msgspec.structs.replace(budget, since=now if former is None else former.since)
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

            if policy is not None:
                details |= await _policy_changes(effective_policy, policy)
            elif await queue.tenant_policy(tenant) is None:
                details["policy"] = "unchanged"
            else:
                details["policy"] = "the queue's"
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

    async def retry_matching(self, model: str, matching: RequestFilter) -> int:
        """Queue all requests again that match and have failed, were cancelled or expired; see ``retry_matching`` of the
        broker.

        Raises:
            ValidationError: ``matching`` names only other states.
        """
        async with self.audit.audited("request.retry_all", model, filter=_filter_words(matching)) as details:
            history = await open_history(self._connection, self._keys, model)
            details["retried"] = count = await retry_matching(history, matching, time.time())
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
        async with self.audit.audited("request.cancel_all", model, filter=_filter_words(matching)) as details:
            history = await open_history(self._connection, self._keys, model)
            details["cancelled"] = count = await cancel_matching(history, matching)
            return count

    async def drain_worker(self, worker_id: str, timeout_s: float, patience_s: float = 0.0) -> None:
        """Have a worker leave when its running requests have ended, after ``timeout_s`` at the latest.

        Args:
            patience_s: wait until it has left, at most this long; 0 to return at once.

        Raises:
            ValidationError: the worker does not exist.
            PenstockError: it has not left after ``patience_s``.
        """
        async with self.audit.audited("worker.drain", worker_id, timeout_s=timeout_s):
            await self._make_leave(worker_id, DrainCommand(timeout_s=timeout_s), patience_s)

    async def stop_worker(self, worker_id: str, patience_s: float = 0.0) -> None:
        """Have a worker requeue its requests and leave. Arguments and errors are as in ``drain_worker``."""
        async with self.audit.audited("worker.stop", worker_id):
            await self._make_leave(worker_id, StopCommand(), patience_s)

    async def scale_worker(self, worker_id: str, num_engines: int, patience_s: float = 0.0) -> None:
        """Have a worker serve with ``num_engines`` engines.

        Args:
            patience_s: wait until it does, at most this long; 0 to return at once.

        Raises:
            ValidationError: the worker does not exist, or cannot have that number.
            PenstockError: it does not serve with that number after ``patience_s``.
        """
        execute, keys = self._connection.execute, self._keys
        async with self.audit.audited("worker.scale", worker_id) as details:
            details["engines"] = await scale_words(execute, keys, worker_id, num_engines)
            if patience_s:
                await scale_worker(execute, keys, worker_id, num_engines, patience_s)
            else:
                await order_scale(execute, keys, worker_id, num_engines)

    async def _make_leave(self, worker_id: str, command: WorkerCommand, patience_s: float) -> None:
        execute = self._connection.execute
        await check_worker(execute, self._keys, worker_id)
        if patience_s:
            await make_leave(execute, self._keys, [worker_id], command, patience_s)
        else:
            await send_to_worker(execute, self._keys, worker_id, command)

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


def _filter_words(matching: RequestFilter) -> str:
    """Return a filter in words: "state failed, tenant acme, since 2026-11-29 14:05:00"."""
    names = ("tenant", "tenant"), ("band", "band"), ("engine_id", "engine"), ("id_prefix", "prefix")
    words = {"state": " ".join(matching.states), **{word: getattr(matching, name) for name, word in names}}
    for name in ("since", "until"):
        at = getattr(matching, name)
        words[name] = at and datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return ", ".join(f"{name} {value}" for name, value in words.items() if value) or "all"


def _budget_words(budget: Budget) -> str:
    return f"{format_number(budget.limit, separator=',')} {budget.unit} {PERIOD_WORDS[budget.period]}"


async def _policy_changes(read: Callable[[], Awaitable[P]], after: P) -> dict[str, str]:
    """Return the fields of a policy that change, with the value before and after, or that none does."""
    try:
        before = await read()
    except ConfigurationError:
        return {"policy": after.encode().decode()}  # the former one is unreadable
    old, new = _policy_fields(before), _policy_fields(after)
    changes = {name: change_words(old[name], value) for name, value in new.items() if value != old[name]}
    return changes or {"policy": "unchanged"}


def _policy_fields(policy: QueuePolicy | TenantPolicy) -> dict[str, str]:
    fields = msgspec.json.decode(policy.encode())
    fields |= {f"tenant {name}": value for name, value in fields.pop("tenant", {}).items()}
    return {name: _policy_value(value) for name, value in fields.items()}


def _policy_value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value)
    return "none" if value is None else format_number(value) if isinstance(value, float) else str(value)
