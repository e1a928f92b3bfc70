"""Statistics as metrics: an engine's last heartbeat, a model's queue, and a device that several models share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ..deployment.records import EngineHeartbeat
from ..messages.devices import DeviceModel, DeviceRecord, ModelPhase
from ..messages.supervision import EngineState
from ..queue.stats import QueueStats
from ..stats import EngineStats, ImageStats, KVOffloadStats
from .catalogue import CONFIGURED, Sample, values_of

# Of an engine that takes requests, or is about to.
SERVING = frozenset({EngineState.READY, EngineState.BUSY, EngineState.COMPILING})


def engines_samples(beats: Sequence[EngineHeartbeat]) -> Iterator[Sample]:
    """Return the metrics of several engines, each under its own label.

    The label is the engine's name, the same in all lives of its worker. Where two of a model have one name, as while a
    worker takes the place of one that has died, the one that began last has it, and others go by their ids.
    """
    last: dict[tuple[str, str], EngineHeartbeat] = {}
    for beat in sorted(beats, key=lambda beat: (beat.started_at, beat.engine_id)):
        last[beat.model, beat.engine_name] = beat
    for beat in beats:
        is_named = beat.engine_name and last[beat.model, beat.engine_name] is beat
        yield from engine_samples(beat, beat.engine_name if is_named else beat.engine_id)


def engine_samples(beat: EngineHeartbeat, label: str) -> Iterator[Sample]:
    """Return the metrics of one engine, under a label."""
    labels = (beat.model, label)
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
            "engine_adapters_loaded": len(beat.lora_digests),
            "engine_restarts": beat.num_restarts,
        },
    )
    if (gpu := beat.device_use) is not None:
        yield from values_of(
            labels,
            {
                "engine_gpu_busy_share": gpu.busy_share,
                "engine_gpu_used_memory_bytes": gpu.used_bytes,
                "engine_gpu_total_memory_bytes": gpu.total_bytes,
                "engine_gpu_power_watts": gpu.power_w,
                "engine_gpu_temperature_celsius": gpu.temperature_c,
            },
        )
    for state in EngineState:
        yield from values_of((*labels, state.value), {"engine_state": float(beat.state == state)})
    yield from values_of((*labels, beat.engine_id, beat.worker_id, beat.host, beat.device), {"engine_info": 1.0})
    if beat.setup is not None:
        setup = msgspec.structs.asdict(beat.setup) | {"version": beat.setup.versions.get("penstock", "")}
        yield from values_of((*labels, *(str(setup[name]) for name in CONFIGURED)), {"engine_config_info": 1.0})
    for process, num_bytes in (("worker", beat.worker_rss_bytes), ("core", beat.core_rss_bytes)):
        yield from values_of((*labels, process), {"engine_resident_memory_bytes": num_bytes})
    if beat.stats is not None:
        yield from _counted(beat.stats, labels)


def _counted(stats: EngineStats, labels: tuple[str, str]) -> Iterator[Sample]:
    yield from values_of(
        labels,
        {
            "prompt_tokens": stats.num_prompt_tokens,
            "prompt_tokens_cached": stats.num_cached_tokens,
            "generation_tokens": stats.num_output_tokens,
            "num_preemptions": stats.num_preemptions,
            "prefix_cache_queries": stats.prefix_cache_queries,
            "prefix_cache_hits": stats.prefix_cache_hits,
            "spec_decode_num_draft_tokens": stats.num_draft_tokens,
            "spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
            "engine_steps": stats.num_steps,
            "engine_prefill_tokens": stats.num_prefill_tokens,
            "engine_decode_tokens": stats.num_decode_tokens,
            "time_to_first_token_seconds": stats.time_to_first_token_s,
            "inter_token_latency_seconds": stats.inter_token_latency_s,
            "e2e_request_latency_seconds": stats.latency_s,
            "request_queue_time_seconds": stats.queue_time_s,
            "request_prefill_time_seconds": stats.prefill_time_s,
            "request_decode_time_seconds": stats.decode_time_s,
            "request_time_per_output_token_seconds": stats.token_time_s,
            "request_inference_time_seconds": stats.inference_time_s,
            "request_prompt_tokens": stats.num_prompt_tokens_of,
            "request_generation_tokens": stats.num_output_tokens_of,
            "request_max_num_generation_tokens": stats.num_output_tokens_of,
            "iteration_tokens_total": stats.num_step_tokens,
            "engine_step_time_seconds": stats.step_time_s,
        },
    )
    if stats.kv_offload is not None:
        yield from _offloaded(stats.kv_offload, labels)
    if stats.images is not None:
        yield from _of_images(stats.images, labels)
    for reason, number in sorted(stats.num_finished.items()):
        yield from values_of((*labels, reason), {"request_success": number})


def _offloaded(stats: KVOffloadStats, labels: tuple[str, str]) -> Iterator[Sample]:
    yield from values_of(
        labels,
        {
            "external_prefix_cache_queries": stats.num_queried_tokens,
            "external_prefix_cache_hits": stats.num_hit_tokens,
            "kv_offload_read_bytes": stats.num_read_bytes,
            "kv_offload_written_bytes": stats.num_written_bytes,
            "kv_offload_dropped_blocks": stats.num_dropped_blocks,
            "kv_offload_corrupt_blocks": stats.num_corrupt_blocks,
            "kv_offload_memory_bytes": stats.memory_bytes,
            "kv_offload_dir_bytes": stats.dir_bytes,
        },
    )


def _of_images(stats: ImageStats, labels: tuple[str, str]) -> Iterator[Sample]:
    yield from values_of(
        labels,
        {
            "mm_cache_queries": stats.num_cache_hits + stats.num_encoded,
            "mm_cache_hits": stats.num_cache_hits,
            "images_processed": stats.num_processed,
            "image_cache_bytes": stats.memory_bytes,
        },
    )


def queue_samples(queue: QueueStats) -> Iterator[Sample]:
    """Return the metrics of one model's queue."""
    yield from values_of(
        (queue.model,),
        {
            "num_requests_waiting": queue.depth,
            "queue_tokens_waiting": queue.num_tokens,
            "queue_oldest_age_seconds": queue.oldest_age_s,
            "queue_estimated_wait_seconds": queue.estimated_wait_s,
            "queue_running_requests": queue.num_running,
            "queue_returned_requests": queue.num_returned,
            "queue_tokens_per_s": queue.tokens_per_s,
            "queue_paused": float(queue.is_paused),
            "queue_warm_requests": queue.num_warm,
            "queue_warm_kept_requests": queue.num_warm_kept,
        },
    )
    for band in queue.bands:
        values = {
            "queue_waiting_requests": band.depth,
            "queue_band_estimated_wait_seconds": band.estimated_wait_s,
        }
        yield from values_of((queue.model, band.band), values)


def devices_samples(devices: Sequence[DeviceRecord]) -> Iterator[Sample]:
    """Return the metrics of devices that several models share, each under its own label.

    The label is host and device, the same in all runs of a worker. If several workers have one, the last by its id has
    this label, and others go by their ids.
    """
    last = {(device.host, device.device): device for device in sorted(devices, key=lambda device: device.device_id)}
    for device in devices:
        is_last = last[device.host, device.device] is device
        yield from _device_samples(device, f"{device.host}/{device.device}" if is_last else device.device_id)


def _device_samples(device: DeviceRecord, label: str) -> Iterator[Sample]:
    yield from values_of((label,), {"swap_share": device.swap_share, "swap_debt_seconds": device.debt_s})
    for part, num_bytes in (("device", device.budget_bytes), ("host", device.host_budget_bytes)):
        yield from values_of((label, part), {"device_budget_bytes": num_bytes})
    for swaps in device.swap_counts:
        yield from values_of((label, swaps.left, swaps.entered, swaps.reason), {"swaps": swaps.count})
    for model in device.models:
        yield from _device_model_samples(model, label)


def _device_model_samples(model: DeviceModel, label: str) -> Iterator[Sample]:
    labels = (model.name, label)
    yield from values_of(
        labels, {"model_standing_seconds": model.standing_s, "recomputed_tokens": model.num_recomputed_tokens}
    )
    for phase in ModelPhase:
        yield from values_of((*labels, phase.value), {"model_state": float(model.phase == phase)})
    for cause, number in sorted(model.wake_failures.items()):
        yield from values_of((*labels, cause), {"wake_failures": number})
    for direction, times in (("wake", model.wakes), ("sleep", model.sleeps)):
        for level, histogram in sorted(times.items()):
            yield from values_of((*labels, direction, level), {"swap_seconds": histogram})
