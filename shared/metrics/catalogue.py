"""Every metric of engines, queues and the deployment: name, kind, labels and meaning; and one value of it.

A name stands behind ``penstock_`` where Prometheus asks, and behind ``penstock:`` in ``Client.get_metrics``. Where vLLM
has a metric of the same meaning it has the same name, and is there with ``vllm:`` as well if that is asked for.

Source: vLLM 0.33, ``vllm/v1/metrics/loggers.py``, for its names and their meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

import msgspec

from ..stats import Histogram

MODEL = "model_name"
OF_MODEL = (MODEL,)
OF_ENGINE = (MODEL, "engine")
# Fields of `EngineSetup`, and the version of the worker.
CONFIGURED = (
    "max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "kv_cache_size_tokens", "dtype",
    "kv_cache_dtype", "quantization", "attention_backend", "scheduling_policy", "processor", "version",
)  # fmt: skip


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricSpec(msgspec.Struct, frozen=True):
    """Definition of one metric.

    Args:
        help: meaning and unit.
        labels: labels after ``model_name``, which all but those of the deployment have.
        is_vllms: whether vLLM has one of that name and meaning.
    """

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...]
    is_vllms: bool = False


COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


# Names of counters are told without "_total", which the exposition adds.
ENGINES = (
    MetricSpec("engine_up", GAUGE, "1 while the engine serves", OF_ENGINE),
    MetricSpec("engine_state", GAUGE, "1 for the state that the engine is in, 0 for the others", (*OF_ENGINE, "state")),
    MetricSpec(
        "engine_info",
        GAUGE,
        "1; process and location of the engine",
        (*OF_ENGINE, "engine_id", "worker", "host", "device"),
    ),
    MetricSpec("engine_config_info", GAUGE, "1; configuration of the engine", (*OF_ENGINE, *CONFIGURED)),
    MetricSpec("engine_start_time_seconds", GAUGE, "Unix time of the start of its worker process", OF_ENGINE),
    MetricSpec("num_requests_running", GAUGE, "Requests in the batch", OF_ENGINE, is_vllms=True),
    MetricSpec("engine_num_requests_waiting", GAUGE, "Claimed requests that are not in the batch", OF_ENGINE),
    MetricSpec("kv_cache_usage_perc", GAUGE, "Share of the KV cache in use, from 0 to 1", OF_ENGINE, is_vllms=True),
    MetricSpec("generation_tokens_per_s", GAUGE, "Output tokens per second", OF_ENGINE),
    MetricSpec("engine_sleep_state", GAUGE, "1 while the engine sleeps", OF_ENGINE),
    MetricSpec("engine_resident_memory_bytes", GAUGE, "Memory of its processes", (*OF_ENGINE, "process")),
    MetricSpec("engine_device_memory_bytes", GAUGE, "Device memory in use", OF_ENGINE),
    MetricSpec("engine_gpu_busy_share", GAUGE, "Share of the last second in which its GPU computed", OF_ENGINE),
    MetricSpec("engine_gpu_used_memory_bytes", GAUGE, "Memory of its GPU in use by all processes", OF_ENGINE),
    MetricSpec("engine_gpu_total_memory_bytes", GAUGE, "Memory of its GPU", OF_ENGINE),
    MetricSpec("engine_gpu_power_watts", GAUGE, "Power of its GPU", OF_ENGINE),
    MetricSpec("engine_gpu_temperature_celsius", GAUGE, "Temperature of its GPU", OF_ENGINE),
    MetricSpec("engine_adapters_loaded", GAUGE, "Loaded LoRA adapters", OF_ENGINE),
    MetricSpec("engine_restarts", COUNTER, "Restarts of its core", OF_ENGINE),
    MetricSpec(
        "prompt_tokens", COUNTER, "Prompt tokens, counted with the first output token", OF_ENGINE, is_vllms=True
    ),
    MetricSpec("prompt_tokens_cached", COUNTER, "Prompt tokens that were in the KV cache", OF_ENGINE, is_vllms=True),
    MetricSpec("generation_tokens", COUNTER, "Output tokens, counted with each step", OF_ENGINE, is_vllms=True),
    MetricSpec(
        "num_preemptions",
        COUNTER,
        "Preemptions: requests that lost their blocks of the KV cache",
        OF_ENGINE,
        is_vllms=True,
    ),
    MetricSpec("prefix_cache_queries", COUNTER, "Tokens searched in the KV cache", OF_ENGINE, is_vllms=True),
    MetricSpec("prefix_cache_hits", COUNTER, "Tokens found in the KV cache", OF_ENGINE, is_vllms=True),
    MetricSpec("spec_decode_num_draft_tokens", COUNTER, "Tokens drafted by speculation", OF_ENGINE, is_vllms=True),
    MetricSpec("spec_decode_num_accepted_tokens", COUNTER, "Accepted draft tokens", OF_ENGINE, is_vllms=True),
    MetricSpec(
        "external_prefix_cache_queries", COUNTER, "Tokens searched in offloaded KV blocks", OF_ENGINE, is_vllms=True
    ),
    MetricSpec("external_prefix_cache_hits", COUNTER, "Tokens found in offloaded KV blocks", OF_ENGINE, is_vllms=True),
    MetricSpec("kv_offload_read_bytes", COUNTER, "Bytes read from offloaded KV blocks", OF_ENGINE),
    MetricSpec("kv_offload_written_bytes", COUNTER, "Bytes written to offloaded KV blocks", OF_ENGINE),
    MetricSpec("kv_offload_dropped_blocks", COUNTER, "KV blocks that could not be offloaded", OF_ENGINE),
    MetricSpec("kv_offload_corrupt_blocks", COUNTER, "Corrupt offloaded KV blocks, computed again", OF_ENGINE),
    MetricSpec("kv_offload_memory_bytes", GAUGE, "Host memory used by offloaded KV blocks", OF_ENGINE),
    MetricSpec("kv_offload_dir_bytes", GAUGE, "Bytes of KV blocks in the shared folder, of all its engines", OF_ENGINE),
    MetricSpec("mm_cache_queries", COUNTER, "Images searched in the cache", OF_ENGINE, is_vllms=True),
    MetricSpec("mm_cache_hits", COUNTER, "Images whose features were cached", OF_ENGINE, is_vllms=True),
    MetricSpec("images_processed", COUNTER, "Images decoded and processed for the model's vision encoder", OF_ENGINE),
    MetricSpec("image_cache_bytes", GAUGE, "Host memory used by cached images and features", OF_ENGINE),
    MetricSpec("engine_steps", COUNTER, "Steps of the engine", OF_ENGINE),
    MetricSpec("engine_prefill_tokens", COUNTER, "Tokens computed in prefills; recomputed ones count again", OF_ENGINE),
    MetricSpec("engine_decode_tokens", COUNTER, "Tokens computed in decodes", OF_ENGINE),
    MetricSpec("request_success", COUNTER, "Requests that ended", (*OF_ENGINE, "finished_reason"), is_vllms=True),
    MetricSpec("time_to_first_token_seconds", HISTOGRAM, "From arrival to the first token", OF_ENGINE, is_vllms=True),
    MetricSpec(
        "inter_token_latency_seconds", HISTOGRAM, "From one token of a request to the next", OF_ENGINE, is_vllms=True
    ),
    MetricSpec(
        "request_time_per_output_token_seconds", HISTOGRAM, "Mean time between tokens of a request", OF_ENGINE, True
    ),
    MetricSpec("e2e_request_latency_seconds", HISTOGRAM, "From arrival to the end", OF_ENGINE, is_vllms=True),
    MetricSpec("request_queue_time_seconds", HISTOGRAM, "From arrival to the first step", OF_ENGINE, is_vllms=True),
    MetricSpec(
        "request_prefill_time_seconds", HISTOGRAM, "From the first step to the first token", OF_ENGINE, is_vllms=True
    ),
    MetricSpec("request_decode_time_seconds", HISTOGRAM, "From the first token to the last", OF_ENGINE, is_vllms=True),
    MetricSpec("request_inference_time_seconds", HISTOGRAM, "From the first step to the last token", OF_ENGINE, True),
    MetricSpec("request_prompt_tokens", HISTOGRAM, "Prompt tokens of a request that ended", OF_ENGINE, is_vllms=True),
    MetricSpec(
        "request_generation_tokens", HISTOGRAM, "Output tokens of a request that ended", OF_ENGINE, is_vllms=True
    ),
    MetricSpec(
        "request_max_num_generation_tokens",
        HISTOGRAM,
        "Output tokens of a request; each of n answers is a request",
        OF_ENGINE,
        True,
    ),
    MetricSpec("iteration_tokens_total", HISTOGRAM, "Tokens that a step computes", OF_ENGINE, is_vllms=True),
    MetricSpec("engine_step_time_seconds", HISTOGRAM, "Time of a step", OF_ENGINE),
)


QUEUES = (
    MetricSpec("num_requests_waiting", GAUGE, "Waiting requests", OF_MODEL, is_vllms=True),
    MetricSpec("queue_waiting_requests", GAUGE, "Waiting requests by band", (MODEL, "band")),
    MetricSpec("queue_tokens_waiting", GAUGE, "Prompt tokens and max_tokens of waiting requests", OF_MODEL),
    MetricSpec("queue_oldest_age_seconds", GAUGE, "Age of the oldest waiting request", OF_MODEL),
    MetricSpec("queue_estimated_wait_seconds", GAUGE, "Estimated wait of a new request", OF_MODEL),
    MetricSpec("queue_band_estimated_wait_seconds", GAUGE, "Estimated wait of a new request by band", (MODEL, "band")),
    MetricSpec("queue_running_requests", GAUGE, "Requests claimed by engines", OF_MODEL),
    MetricSpec(
        "queue_returned_requests", GAUGE, "Requests that returned to the queue and wait for an engine", OF_MODEL
    ),
    MetricSpec("queue_tokens_per_s", GAUGE, "Prompt tokens and max_tokens served per second", OF_MODEL),
    MetricSpec("queue_paused", GAUGE, "1 while the queue is paused", OF_MODEL),
    MetricSpec("queue_warm_requests", COUNTER, "Requests whose conversation was cached by an engine", OF_MODEL),
    MetricSpec("queue_warm_kept_requests", COUNTER, "Such requests that went to that engine", OF_MODEL),
    MetricSpec("wanted_engines", GAUGE, "Number of engines that the load needs", OF_MODEL),
    MetricSpec("dead_letter_requests", GAUGE, "Parked requests", OF_MODEL),
    MetricSpec(
        "tenant_tokens_today", GAUGE, "Tokens of the 50 largest tenants; `*` for others", (MODEL, "tenant", "kind")
    ),
)


# A device that several models share.
OF_DEVICE = ("device",)
DEVICES = (
    MetricSpec(
        "model_state", GAUGE, "1 for the state that the model is in, 0 for the others", (MODEL, *OF_DEVICE, "state")
    ),
    MetricSpec(
        "model_standing_seconds", GAUGE, "Time for which its oldest request waits to wake it", (MODEL, *OF_DEVICE)
    ),
    MetricSpec("recomputed_tokens", COUNTER, "Tokens of its requests computed again after swaps", (MODEL, *OF_DEVICE)),
    MetricSpec("wake_failures", COUNTER, "Failed wakes", (MODEL, *OF_DEVICE, "cause")),
    MetricSpec(
        "swap_seconds", HISTOGRAM, "Time to wake it, or to put it to sleep", (MODEL, *OF_DEVICE, "direction", "level")
    ),
    MetricSpec("swaps", COUNTER, "Swaps of models", (*OF_DEVICE, "from", "to", "reason")),
    MetricSpec("swap_share", GAUGE, "Share of the last ten minutes that swaps took", OF_DEVICE),
    MetricSpec("swap_debt_seconds", GAUGE, "Time of swaps not repaid yet; below 0 for credit", OF_DEVICE),
    MetricSpec(
        "device_budget_bytes", GAUGE, "Memory for all its models, of the device and the host", (*OF_DEVICE, "part")
    ),
)


DEPLOYMENT = (
    MetricSpec("build_info", GAUGE, "1; version of the exporter", ("version",)),
    MetricSpec("snapshot_ok", GAUGE, "1 if the last read of queues and engines succeeded", ()),
    MetricSpec("snapshot_age_seconds", GAUGE, "Time since the last successful read", ()),
    MetricSpec("webhook_deliveries", GAUGE, "Webhook deliveries by state", ("state",)),
    MetricSpec("budget_used_share", GAUGE, "Spent share of a budget", ("tenant", "key", "period")),
    MetricSpec("open_batches", GAUGE, "Batches that have not ended", ()),
    MetricSpec("redis_used_memory_bytes", GAUGE, "Memory that Redis uses", ("server",)),
    MetricSpec("redis_max_memory_bytes", GAUGE, "Memory limit of Redis; 0 without a limit", ("server",)),
    MetricSpec("redis_append_only", GAUGE, "1 if Redis keeps an append-only file", ("server",)),
    MetricSpec("redis_up", GAUGE, "1 if Redis answers", ("server",)),
)


ALL = {spec.name: spec for spec in (*ENGINES, *QUEUES, *DEVICES, *DEPLOYMENT)}


class Sample(msgspec.Struct, frozen=True):
    """The value of a metric at one moment, with the values of its labels."""

    spec: MetricSpec
    labels: tuple[str, ...]
    value: float | Histogram


def values_of(labels: tuple[str, ...], values: Mapping[str, float | Histogram | None]) -> Iterator[Sample]:
    """Return a sample of each metric by name, with the same labels; None is unknown and left out."""
    for name, value in values.items():
        if value is not None:
            yield Sample(ALL[name], labels, value)
