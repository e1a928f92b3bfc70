"""Counters and histograms of one engine's work."""

from __future__ import annotations

from collections import Counter

from ....shared.broker.series import TenantPoint
from ....shared.messages.deltas import Delta
from ....shared.messages.from_core import SchedulerStats
from ....shared.stats.engine import EngineStats, StepStats


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
