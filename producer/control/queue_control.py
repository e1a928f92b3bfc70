"""The client's methods for queues: their state, pauses and policies, and the requests of all clients in them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Set
from typing import Literal, get_args

import msgspec

from ...shared.broker import RequestFilter, RequestHistory
from ...shared.broker.bulk import count_matching
from ...shared.broker.series import SeriesPoint
from ...shared.control.engine import (
    ENCODER,
    MULTIMODAL,
    InputCacheReset,
    PrefixCacheReset,
    ResetInputCache,
    ResetPrefixCache,
)
from ...shared.errors import DrainTimeoutError, EngineDeadError, RequestNotFoundError, ValidationError
from ...shared.partitions import open_history, open_queue, read_series
from ...shared.queue.lifecycle import LIVE_STATES, RequestEvent, RequestState, RequestSummary
from ...shared.queue.policy import QueuePolicy, TenantPolicy
from ...shared.queue.stats import QueueStats, RequestStatus
from ...shared.values.checks import check_timeout
from ...shared.values.names import check_name
from ...shared.values.shown import shown
from ..client_parts.core import CallOptions, ClientCore
from ..requests.health import may_serve

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES = get_args(PauseMode)
POLL_S = 0.1
CLEAR_TIMEOUT_S = 30.0


class QueueControl(ClientCore):
    """The part of the client for queues. ``model`` may be left out as for a request.

    All methods raise ``UnknownModelError`` if no worker has ever served ``model`` here.
    """

    async def queue_stats(self, model: str | None = None, *, tenants: bool = True) -> QueueStats:
        """Return the waiting and running requests, by band and tenant: their number, age, size and estimated time.

        Args:
            tenants: pass False to leave the tenants out, which takes constant time however many there are.
        """
        return await (await self._queue(model)).stats(tenants=tenants)

    async def queue_history(
        self, model: str | None = None, *, hours: float = 1.0, step_s: int | None = None
    ) -> list[SeriesPoint]:
        """Return the statistics of a model over the last ``hours``, one point per step, the oldest first.

        Args:
            step_s: 60 (stored for a day), 600 (a week) or 3600 (90 days); by default the finest that covers ``hours``.

        Raises:
            ValidationError: ``hours`` is not above 0 and at most 2160, or ``step_s`` does not cover ``hours``.
        """
        name = (await self._card(model)).model
        return await read_series(self._commands, self._keys, name, hours=hours, step_s=step_s)

    async def status(self, request_id: str, model: str | None = None) -> RequestStatus:
        """Return the state of a request and, while it waits, its position and estimated start.

        Raises:
            RequestNotFoundError: the request is unknown, or its result has expired.
        """
        name, request_id = (await self._card(model)).model, check_name("request_id", request_id)
        queue = await open_queue(self._commands, self._keys, name)
        status, engines = await asyncio.gather(queue.status(request_id), self._health.engines(name))
        if status is None:
            raise RequestNotFoundError(f"request {shown(request_id)} is unknown, or its result has expired")
        return msgspec.structs.replace(status, num_engines=sum(map(may_serve, engines)))

    async def pause_generation(
        self,
        model: str | None = None,
        *,
        mode: PauseMode = "keep",
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = False,
    ) -> dict[str, bool]:
        """Start no request of a model until ``resume_generation``. Return once no request runs.

        Requests are accepted meanwhile, and wait. The pause is stored in Redis, so it outlives this client, the workers
        and their restarts.

        Args:
            mode: of running requests: "keep" requeues them immediately, to resume after their last token when the model
                is resumed; "wait" lets them finish; "abort" ends them with finish_reason "abort".
            wait_for_inflight_requests: the same as mode "wait".
            clear_cache: have all engines drop the cached prefixes and images of earlier prompts, as after a change of
                weights. The result then says for each engine whether it did; otherwise it is empty.

        Raises:
            ValidationError: ``mode`` is unknown, or "abort" is combined with ``wait_for_inflight_requests``.
            EngineCallError: with ``clear_cache``, an engine failed or did not answer. The model is paused.
        """
        if wait_for_inflight_requests:
            if mode == "abort":
                raise ValidationError("wait_for_inflight_requests=True and mode='abort' contradict each other")
            mode = "wait"
        if mode not in PAUSE_MODES:
            raise ValidationError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {shown(mode)}")
        queue, name = await self._queue(model), (await self._card(model)).model
        await self._operations.pause(name, put_back=mode == "keep", abort=mode == "abort")
        while (await queue.stats()).num_running:  # noqa: ASYNC110  # other processes send no event to wait for
            await asyncio.sleep(POLL_S)
        return await self._clear_caches(model) if clear_cache else {}

    async def _clear_caches(self, model: str | None) -> dict[str, bool]:
        """Clear the caches of all engines. Retry for a while, since an engine learns of requeued requests only after
        Redis does.
        """
        deadline = time.monotonic() + CLEAR_TIMEOUT_S
        while True:
            try:
                answers = await self._call_engines(ResetPrefixCache(), PrefixCacheReset, CallOptions(model=model))
                cleared = {engine_id: answer.success for engine_id, answer in answers.items()}
                if all(cleared.values()) or time.monotonic() >= deadline:
                    for cache in (ENCODER, MULTIMODAL):
                        await self._call_engines(ResetInputCache(cache), InputCacheReset, CallOptions(model=model))
                    return cleared
            except EngineDeadError:  # an engine that is not up has no cache
                return {}
            await asyncio.sleep(POLL_S)

    async def wait_for_requests_to_drain(self, drain_timeout_s: float = 300.0, *, model: str | None = None) -> None:
        """Return when no request of a model waits or runs; if the model is paused, when none runs.

        A request with streamed input that has answered all its chunks occupies no engine, and is not waited for.

        Raises:
            DrainTimeoutError: requests were left after ``drain_timeout_s``; it is also a ``TimeoutError``.
        """
        check_timeout("drain_timeout_s", drain_timeout_s)
        queue, deadline = await self._queue(model), time.monotonic() + drain_timeout_s
        while True:
            stats = await queue.stats()
            num_waiting = 0 if stats.is_paused else stats.depth
            if not (stats.num_running or num_waiting):
                return
            if time.monotonic() >= deadline:
                raise DrainTimeoutError(
                    f"{stats.num_running} requests of model {shown(stats.model)} still run and {stats.depth} wait "
                    f"after {drain_timeout_s:g} s"
                )
            await asyncio.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))

    async def get_num_unfinished_requests(self, model: str | None = None) -> int:
        """Return how many requests of a model wait, run or await more input, whichever client enqueued them."""
        stats = await (await self._queue(model)).stats()
        return stats.depth + stats.num_running + stats.num_awaiting_input

    async def has_unfinished_requests(self, model: str | None = None) -> bool:
        return await self.get_num_unfinished_requests(model) > 0

    async def resume_generation(self, model: str | None = None) -> None:
        """Start requests again. Does nothing if the model was not paused."""
        await self._operations.resume((await self._card(model)).model)

    async def is_paused(self, model: str | None = None) -> bool:
        return await (await self._queue(model)).is_paused()

    async def queue_policy(self, model: str | None = None) -> QueuePolicy:
        """Return the queue policy of a model: how its requests wait."""
        return await (await self._queue(model)).policy()

    async def configure_queue(self, policy: QueuePolicy, model: str | None = None) -> None:
        """Set the queue policy of a model. It applies immediately, also to waiting requests.

        Raises:
            ValidationError: requests wait in a band that ``policy`` lacks.
        """
        await self._operations.configure((await self._card(model)).model, policy)

    async def configure_tenant(self, tenant: str, policy: TenantPolicy | None, model: str | None = None) -> None:
        """Set a tenant's policy for a model; None restores the queue's default."""
        await self._operations.configure_tenant((await self._card(model)).model, tenant, policy)

    async def purge(self, tenant: str, *, band: str | None = None, model: str | None = None) -> int:
        """Cancel a tenant's waiting requests that never ran, in one band or all, and return their number."""
        return await self._operations.purge((await self._card(model)).model, tenant, band or "")


class RequestView(ClientCore):
    """The part of the client that lists requests as operators see them: without prompts and outputs.

    All methods raise ``UnknownModelError`` if no worker has ever served ``model`` here.
    """

    async def requests(
        self, wanted: RequestFilter | None = None, *, model: str | None = None, limit: int = 100
    ) -> list[RequestSummary]:
        """Return the requests of a model that match ``wanted``, or all; see ``RequestHistory.requests``.

        Raises:
            ValidationError: ``limit`` is not in [1, 10000].
        """
        return await (await self._history(model)).requests(wanted or RequestFilter(), limit=limit)

    async def find_request(self, request_id: str, *, model: str | None = None) -> RequestSummary | None:
        """Return the summary of one request, also after its result has expired; None if the request is unknown."""
        return await (await self._history(model)).find(request_id)

    async def history(self, request_id: str, *, model: str | None = None) -> list[RequestEvent]:
        """Return the events of one request, the oldest first; [] if the request is unknown."""
        return await (await self._history(model)).history(request_id)

    async def request_events(
        self, *, after: str = "0-0", model: str | None = None, limit: int = 500
    ) -> list[RequestEvent]:
        """Return the events of all requests of a model after the event ``after``, the oldest first.

        Raises:
            ValidationError: ``after`` is not the id of an event.
        """
        return await (await self._history(model)).events(after=after, limit=limit)

    async def last_event_id(self, *, model: str | None = None) -> str:
        """Return the id of a model's newest event, to follow the events after it; "0-0" if the model has none."""
        return await (await self._history(model)).last_event_id()

    async def count_requests(
        self, wanted: RequestFilter, *, model: str | None = None, states: Set[RequestState] = LIVE_STATES
    ) -> int:
        """Return how many requests ``cancel_requests`` would end now, counted up to 10,000.

        Args:
            states: ``RETRYABLE_STATES`` counts those that ``retry_requests`` would try to queue.
        """
        return await count_matching(await self._history(model), wanted, states)

    async def cancel_requests(self, wanted: RequestFilter, *, model: str | None = None) -> int:
        """End the requests that match ``wanted`` and that wait, run or await input, and return their number.

        Raises:
            ValidationError: ``wanted`` is empty, or names only ended states.
        """
        return await self._operations.cancel_matching((await self._card(model)).model, wanted)

    async def retry_requests(self, wanted: RequestFilter, *, model: str | None = None) -> int:
        """Queue the failed, cancelled and expired requests that match ``wanted`` again, from their prompts.

        Return their number. Requests whose input is not stored any more stay as they are, and are not counted.

        Raises:
            ValidationError: ``wanted`` is empty, or names only other states.
        """
        return await self._operations.retry_matching((await self._card(model)).model, wanted)

    async def replay_requests(self, request_ids: Iterable[str] | None = None, *, model: str | None = None) -> int:
        """Requeue parked requests, those of ``request_ids`` or all. Return the number of those that can run."""
        return await self._operations.replay_all_dead((await self._card(model)).model, request_ids)

    async def _history(self, model: str | None) -> RequestHistory:
        return await open_history(self._commands, self._keys, (await self._card(model)).model)
