"""Records of one engine's work: counters and histograms, the time series of its model, and a file with each step."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from pathlib import Path

import msgspec
import structlog
from redis.exceptions import RedisError

from ....shared.broker.series import HISTOGRAMS, SeriesStore, TenantPoint, bucket_amounts
from ....shared.broker.writes import STATE_OF
from ....shared.errors import PenstockError
from ....shared.messages.core import EngineCoreOutputs, SchedulerStats
from ....shared.messages.deltas import Delta
from ....shared.messages.outcome import FinishReason
from ....shared.queue.lifecycle import RequestState
from ....shared.stats import STEPS_SUFFIX, EngineStats, RecordedStep, StepStats, encode_steps

# At most this many steps are lost if the process is killed.
STEPS_PER_WRITE = 256


class EngineMeter:
    """Statistics of one engine in ``stats``, from the start of its worker process."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self._tenants: dict[str, TenantPoint] = {}

    def count_tenant(self, tenant: str, num_tokens: int, delta: Delta | None) -> None:
        """Count new output tokens of a tenant, and an end if the delta is one."""
        is_end = delta is not None and delta.finish_reason is not None
        if not (num_tokens or is_end):
            return
        point = self._tenant_point(tenant)
        point.tokens_out += num_tokens
        if is_end:
            point.requests += 1

    def count_prompt(self, tenant: str, num_tokens: int, num_cached: int) -> None:
        """Count a prompt whose first output token was generated."""
        self.stats.num_prompt_tokens += num_tokens
        self.stats.num_cached_tokens += num_cached
        self._tenant_point(tenant).tokens_in += num_tokens

    def _tenant_point(self, tenant: str) -> TenantPoint:
        point = self._tenants.get(tenant)
        if point is None:
            point = self._tenants[tenant] = TenantPoint()
        return point

    def pop_tenants(self) -> dict[str, TenantPoint]:
        """Return the counts of each tenant since the last call."""
        tenants, self._tenants = self._tenants, {}
        return tenants

    def copy_scheduler_stats(self, scheduler: SchedulerStats) -> None:
        """Copy the core's own counters, which run since its start."""
        self.stats.num_preemptions = scheduler.num_preemptions
        self.stats.prefix_cache_queries = scheduler.prefix_cache_queries
        self.stats.prefix_cache_hits = scheduler.prefix_cache_hits
        self.stats.num_draft_tokens = scheduler.num_draft_tokens
        self.stats.num_accepted_tokens = scheduler.num_accepted_tokens
        self.stats.kv_offload = scheduler.kv_offload
        self.stats.images = scheduler.images

    def record_step(self, step: StepStats) -> None:
        """Count a step."""
        stats = self.stats
        stats.num_steps += 1
        stats.num_prefill_tokens += step.num_prefill_tokens
        stats.num_decode_tokens += step.num_decode_tokens
        stats.schedule_time_s += step.schedule_time_s
        stats.execute_time_s += step.execute_time_s
        stats.update_time_s += step.update_time_s
        stats.step_time_s.observe(step.step_time_s)
        num_tokens = step.num_prefill_tokens + step.num_decode_tokens
        if num_tokens:
            stats.num_step_tokens.observe(num_tokens)
            stats.step_tokens_squared += num_tokens**2
            stats.step_token_seconds += num_tokens * step.execute_time_s

    def count_tokens(self, num_tokens: int, seconds: list[float], num_at_once: int = 0) -> None:
        """Count the tokens that a step has generated.

        Args:
            num_tokens: number for all requests together.
            seconds: time since the previous token, one per request; mostly the same value.
            num_at_once: number of tokens that were generated together with the one before.
        """
        self.stats.num_output_tokens += num_tokens
        for interval_s, count in Counter(seconds).items():
            self.stats.inter_token_latency_s.observe(interval_s, count)
        if num_at_once:
            self.stats.inter_token_latency_s.observe(0.0, num_at_once)

    def count_delta(self, delta: Delta) -> None:
        """Count a delta that a client receives, if it has a first token or an end."""
        stats, request_stats = self.stats, delta.stats
        if request_stats is not None and (delta.token_ids or delta.pooled) and request_stats.decode_time_s == 0:
            stats.queue_time_s.observe(request_stats.queue_time_s)
            stats.prefill_time_s.observe(request_stats.prefill_time_s)
            stats.time_to_first_token_s.observe(request_stats.time_to_first_token_s)
        if delta.finish_reason is None and not delta.segment_ends:
            return
        if delta.finish_reason is not None:
            reason = delta.finish_reason.value
            stats.num_finished[reason] = stats.num_finished.get(reason, 0) + 1
        if request_stats is not None:
            stats.latency_s.observe(request_stats.latency_s)
            if delta.next_index > 0:
                stats.decode_time_s.observe(request_stats.decode_time_s)
                stats.inference_time_s.observe(request_stats.prefill_time_s + request_stats.decode_time_s)
            if delta.next_index > 1:
                stats.token_time_s.observe(request_stats.inter_token_latency_s)
        if delta.finish_reason is not None and delta.usage is not None:
            stats.num_prompt_tokens_of.observe(delta.usage.num_prompt_tokens)
            stats.num_output_tokens_of.observe(delta.usage.num_output_tokens)


SERIES_INTERVAL_S = 10.0
LAST_WRITE_TIMEOUT_S = 1.0
# Per interval, this many tenants are written separately: those with the most tokens.
MAX_TENANTS = 100

log = structlog.get_logger()


class SeriesWriter:
    """Writer of one engine process. If the process dies, only the counts since its last write are lost."""

    def __init__(self, store: SeriesStore, meter: EngineMeter) -> None:
        self._store = store
        self._meter = meter
        self._writer = uuid.uuid4().hex
        self._number = 0
        self._written = EngineStats()

    async def run(self) -> None:
        """Write every ``SERIES_INTERVAL_S`` until cancelled."""
        while True:
            await asyncio.sleep(SERIES_INTERVAL_S)
            try:
                await self.add()
            except (PenstockError, RedisError) as error:
                log.warning("series_not_written", error=str(error))

    async def add_last(self) -> None:
        """Write the last counts within ``LAST_WRITE_TIMEOUT_S``; an unreachable Redis must not delay the exit."""
        try:
            async with asyncio.timeout(LAST_WRITE_TIMEOUT_S):
                await self.add()
        except (TimeoutError, PenstockError, RedisError) as error:
            log.warning("series_not_written", error=str(error) or "Redis does not answer")

    async def add(self) -> None:
        """Write the counts since the last write."""
        now = msgspec.convert(msgspec.to_builtins(self._meter.stats), EngineStats)
        tenants = self._meter.pop_tenants()
        amounts = _difference(now, self._written)
        self._written = now
        amounts["tokens_out"] = sum(point.tokens_out for point in tenants.values())
        amounts = {name: amount for name, amount in amounts.items() if amount}
        if amounts or tenants:
            self._number += 1
            await self._store.add(self._writer, self._number, amounts, most_active(tenants))


def most_active(tenants: dict[str, TenantPoint]) -> dict[str, TenantPoint]:
    """Return the tenants with the most tokens by name, and the sums of all others under ""."""
    ranked = sorted(tenants, key=lambda tenant: -(tenants[tenant].tokens_in + tenants[tenant].tokens_out))
    points = {tenant: tenants[tenant] for tenant in ranked[:MAX_TENANTS]}
    for tenant in ranked[MAX_TENANTS:]:
        rest, point = points.setdefault("", TenantPoint()), tenants[tenant]
        rest.tokens_in += point.tokens_in
        rest.tokens_out += point.tokens_out
        rest.requests += point.requests
    return points


def _difference(now: EngineStats, before: EngineStats) -> dict[str, int]:
    amounts = {"tokens_in": now.num_prompt_tokens - before.num_prompt_tokens}
    for reason, count in now.num_finished.items():
        field = f"ended:{STATE_OF.get(FinishReason(reason), RequestState.FINISHED)}"
        amounts[field] = amounts.get(field, 0) + count - before.num_finished.get(reason, 0)
    for name in HISTOGRAMS:
        amounts |= bucket_amounts(name, getattr(now, name), getattr(before, name))
    return amounts


class StepLog:
    """Log of steps in ``folder``, in a file with the engine's id; no log if ``folder`` is empty.

    An error of the disk ends the log, but not the engine.
    """

    def __init__(self, folder: str, engine_id: str) -> None:
        self._path = Path(folder) / f"{engine_id}{STEPS_SUFFIX}" if folder else None
        self._steps: list[RecordedStep] = []
        self._ended_s = 0.0
        self._has_more = False

    def record(self, outputs: EngineCoreOutputs) -> None:
        """Record a step; outputs without step statistics are none."""
        if self._path is None or outputs.scheduler_stats is None:
            return
        if outputs.step_stats is not None:
            own_s = outputs.step_stats.step_time_s
            took_s = outputs.timestamp - self._ended_s if self._has_more else own_s
            self._steps.append(RecordedStep(outputs.timestamp, max(own_s, took_s), outputs.step_stats))
        stats = outputs.scheduler_stats
        self._ended_s, self._has_more = outputs.timestamp, stats.num_running_reqs + stats.num_waiting_reqs > 0
        if len(self._steps) >= STEPS_PER_WRITE:
            self.write()

    def write(self) -> None:
        """Write the recorded steps that are not in the file yet."""
        steps, self._steps = self._steps, []
        if self._path is None or not steps:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(encode_steps(steps))
        except OSError as error:
            log.warning("step_log_failed", path=str(self._path), error=str(error))
            self._path = None
