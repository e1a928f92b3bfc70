"""An engine's last heartbeat as metrics."""

from __future__ import annotations

from collections.abc import Iterator

from ..messages import EngineState
from ..records import EngineHeartbeat
from ..stats import EngineStats
from .sample import Sample, values_of

# Of an engine that takes requests, or is about to.
SERVING = frozenset({EngineState.READY, EngineState.BUSY, EngineState.COMPILING})


def engine_samples(beat: EngineHeartbeat) -> Iterator[Sample]:
    """Return what one engine tells."""
    labels = (beat.model, beat.engine_id)
    yield from values_of(
        labels,
        {
            "engine_up": float(beat.state in SERVING),
            "engine_start_time_seconds": beat.started_at,
            "num_requests_running": beat.num_running_reqs,
            "engine_num_requests_waiting": beat.num_waiting_reqs,
            "kv_cache_usage_perc": beat.kv_cache_usage,
            "generation_tokens_per_s": beat.tokens_per_s,
            "engine_sleep_state": float(beat.state == EngineState.SLEEPING),
            "engine_device_memory_bytes": beat.device_memory_bytes,
            "engine_restarts": beat.num_restarts,
        },
    )
    for state in EngineState:
        yield from values_of((*labels, state.value), {"engine_state": float(beat.state == state)})
    yield from values_of((*labels, beat.worker_id, beat.host, beat.device), {"engine_info": 1.0})
    for process, num_bytes in (("worker", beat.worker_rss_bytes), ("core", beat.core_rss_bytes)):
        yield from values_of((*labels, process), {"engine_resident_memory_bytes": num_bytes})
    if beat.stats is not None:
        yield from _counted(beat.stats, labels)


def _counted(stats: EngineStats, labels: tuple[str, str]) -> Iterator[Sample]:
    yield from values_of(
        labels,
        {
            "prompt_tokens": stats.num_prompt_tokens,
            "generation_tokens": stats.num_output_tokens,
            "num_preemptions": stats.num_preemptions,
            "prefix_cache_queries": stats.prefix_cache_queries,
            "prefix_cache_hits": stats.prefix_cache_hits,
            "engine_steps": stats.num_steps,
            "engine_prefill_tokens": stats.num_prefill_tokens,
            "engine_decode_tokens": stats.num_decode_tokens,
            "time_to_first_token_seconds": stats.time_to_first_token_s,
            "inter_token_latency_seconds": stats.inter_token_latency_s,
            "e2e_request_latency_seconds": stats.latency_s,
            "request_queue_time_seconds": stats.queue_time_s,
            "request_prefill_time_seconds": stats.prefill_time_s,
            "request_decode_time_seconds": stats.decode_time_s,
            "engine_step_time_seconds": stats.step_time_s,
        },
    )
    for reason, number in sorted(stats.num_finished.items()):
        yield from values_of((*labels, reason), {"request_success": number})
