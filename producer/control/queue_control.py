"""What a client may know of the queue, and do with it."""

from __future__ import annotations

import asyncio
import time
from typing import Literal, get_args

import msgspec

from ...shared.broker.series import SeriesPoint
from ...shared.control.caches import (
    ENCODER,
    MULTIMODAL,
    InputCacheReset,
    PrefixCacheReset,
    ResetInputCache,
    ResetPrefixCache,
)
from ...shared.errors import DrainTimeoutError, EngineDeadError, RequestNotFoundError, ValidationError
from ...shared.partitions import open_queue, read_series
from ...shared.queue.policy import QueuePolicy, TenantPolicy
from ...shared.queue.stats import QueueStats, RequestStatus
from ...shared.values.names import check_name
from ...shared.values.shown import shown
from ...shared.values.timeouts import check_timeout
from ..client_core import ClientCore
from ..engine_calls import CallOptions
from ..requests.health import may_serve

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES = get_args(PauseMode)
POLL_S = 0.1
CLEAR_TIMEOUT_S = 30.0


class QueueControl(ClientCore):
    """The part of the client that is about queues. ``model`` may be left out as for a request.

    All methods raise ``UnknownModelError`` if no worker has ever served ``model`` here.
    """

    async def queue_stats(self, model: str | None = None, *, tenants: bool = True) -> QueueStats:
        """Return what waits and runs, how old and how much it is, and how long it will take; by band and tenant.

        Args:
            tenants: leave the tenants out when False, which takes one short look however many there are.
        """
        return await (await self._queue(model)).stats(tenants=tenants)

    async def queue_history(
        self, model: str | None = None, *, hours: float = 1.0, step_s: int | None = None
    ) -> list[SeriesPoint]:
        """Return what was counted of a model in the last ``hours``, a point for each step, the oldest first.

        Args:
            step_s: 60 (kept a day), 600 (a week) or 3600 (90 days); by default the finest that reaches back so far.

        Raises:
            ValidationError: ``hours`` is not above 0 and at most 2160, or ``step_s`` does not reach back so far.
        """
        name = (await self._card(model)).model
        return await read_series(self._commands, self._keys, name, hours=hours, step_s=step_s)

    async def status(self, request_id: str, model: str | None = None) -> RequestStatus:
        """Return where a request stands: its state, and while it waits its position and estimated start.

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
        """Start no request of a model until ``resume_generation``; returns when none runs.

        Requests are accepted meanwhile, and wait. The pause is in Redis: it outlives this client, the workers and
        their restarts.

        Args:
            mode: of requests that run: "keep" queues them again at once, to go on after their last token when the model
                is resumed; "wait" lets them come to their end; "abort" ends them, with finish_reason "abort".
            wait_for_inflight_requests: another way to say "wait".
            clear_cache: have all engines forget what earlier prompts have left, as after a change of weights: in the KV
                cache, and what was made of images. Returns, then, for each engine whether it did; else nothing.

        Raises:
            ValidationError: ``mode`` is none of these, or "abort" and ``wait_for_inflight_requests`` are both said.
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
        while (await queue.stats()).num_running:  # noqa: ASYNC110  # of other processes: there is no event to wait for
            await asyncio.sleep(POLL_S)
        return await self._clear_caches(model) if clear_cache else {}

    async def _clear_caches(self, model: str | None) -> dict[str, bool]:
        """Again and again for a while: an engine hears of what was taken from it a moment after Redis did it."""
        deadline = time.monotonic() + CLEAR_TIMEOUT_S
        while True:
            try:
                answers = await self._call_engines(ResetPrefixCache(), PrefixCacheReset, CallOptions(model=model))
                cleared = {engine_id: answer.success for engine_id, answer in answers.items()}
                if all(cleared.values()) or time.monotonic() >= deadline:
                    for cache in (ENCODER, MULTIMODAL):
                        await self._call_engines(ResetInputCache(cache), InputCacheReset, CallOptions(model=model))
                    return cleared
            except EngineDeadError:  # who is not there has no cache
                return {}
            await asyncio.sleep(POLL_S)

    async def wait_for_requests_to_drain(self, drain_timeout_s: float = 300.0, *, model: str | None = None) -> None:
        """Return when no request of a model waits or runs; of a paused model, when none runs.

        A request with streamed input that has answered all it got holds no engine, and is not waited for.

        Raises:
            DrainTimeoutError: some were left after ``drain_timeout_s``; it is a ``TimeoutError``, too.
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
        """Return how many requests of a model wait, run, or wait for more of their input; whoever enqueued them."""
        stats = await (await self._queue(model)).stats()
        return stats.depth + stats.num_running + stats.num_awaiting_input

    async def has_unfinished_requests(self, model: str | None = None) -> bool:
        return await self.get_num_unfinished_requests(model) > 0

    async def resume_generation(self, model: str | None = None) -> None:
        """Start requests again; does nothing if the model was not paused."""
        await self._operations.resume((await self._card(model)).model)

    async def is_paused(self, model: str | None = None) -> bool:
        return await (await self._queue(model)).is_paused()

    async def queue_policy(self, model: str | None = None) -> QueuePolicy:
        """Return how the requests of a model wait."""
        return await (await self._queue(model)).policy()

    async def configure_queue(self, policy: QueuePolicy, model: str | None = None) -> None:
        """Set how the requests of a model wait; it counts at once, and for what waits as well.

        Raises:
            ValidationError: requests wait in a band that ``policy`` has not.
        """
        await self._operations.configure((await self._card(model)).model, policy)

    async def configure_tenant(self, tenant: str, policy: TenantPolicy | None, model: str | None = None) -> None:
        """Set what a tenant may have of a model; None gives it the queue's default again."""
        await self._operations.configure_tenant((await self._card(model)).model, tenant, policy)

    async def purge(self, tenant: str, *, band: str | None = None, model: str | None = None) -> int:
        """Cancel what waits of a tenant and never ran, in one band or all; returns how many that was."""
        return await self._operations.purge((await self._card(model)).model, tenant, band or "")
