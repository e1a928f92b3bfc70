"""Times and counts of requests, steps and engines, as they are sent to callers, metrics and dashboards."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

import msgspec

from .errors import ConfigurationError

# Seconds. Of a whole request and of its parts.
REQUEST_TIME_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2,
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
FIRST_TOKEN_TIME_S = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_TIME_S = (
    0.0005, 0.001, 0.0025, 0.005,
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
# vLLM has none of these.
STEP_TIME_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
# Tokens of a request: 1, 2, 5, 10 and so on. vLLM ends at the model's length, we at a length above all models'.
REQUEST_TOKENS = tuple(
    float(digit * 10**power) for power in range(7) for digit in (1, 2, 5) if digit * 10**power <= 2e6
)
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
STEPS_SUFFIX = ".steps.jsonl"
_encoder = msgspec.json.Encoder()


class RequestStats(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """Times of one request. Sent with the first delta, and complete with the last.

    With streamed input each segment has its own, from when its chunk could be answered.

    Args:
        queue_time_s: from its arrival in Redis to the first step that computed a part of it.
        prefill_time_s: from there to its first output token.
        decode_time_s: from the first output token to the last, including the time of an engine's death in between.
        time_to_first_token_s: the first two together.
        inter_token_latency_s: mean over its output tokens; 0 with less than two.
        latency_s: from its arrival to this delta.
        num_preemptions: how often the engine that ended it removed it from its KV cache.
        num_deliveries: how many times an engine has claimed it.
    """

    queue_time_s: float = 0.0
    prefill_time_s: float = 0.0
    decode_time_s: float = 0.0
    time_to_first_token_s: float = 0.0
    inter_token_latency_s: float = 0.0
    latency_s: float = 0.0
    num_preemptions: int = 0
    num_deliveries: int = 1


class StepStats(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """Counts and times of one step of an engine.

    ``num_prefill_tokens`` are those of requests that lacked more than one token, ``num_decode_tokens`` those of the
    others, including draft tokens.
    ``num_context_tokens`` are those in the cache that the others looked back at, and ``num_prefill_pairs`` the pairs of
    a prefilled token and one that it looked back at. ``cpu_time_s`` is what the core's thread computed of the step's
    time: the rest of the time it waited for a device, or for a busy processor.
    """

    num_reqs: int = 0
    num_prefill_reqs: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    schedule_time_s: float = 0.0
    execute_time_s: float = 0.0
    update_time_s: float = 0.0
    num_context_tokens: int = 0
    num_prefill_pairs: int = 0
    cpu_time_s: float = 0.0

    @property
    def step_time_s(self) -> float:
        return self.schedule_time_s + self.execute_time_s + self.update_time_s


class Histogram(msgspec.Struct, omit_defaults=True):
    """Counts of values: ``counts[i]`` of those above ``bounds[i - 1]`` up to ``bounds[i]``, the last of all above."""

    bounds: tuple[float, ...] = ()
    counts: list[int] = []
    sum: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> Histogram:
        """Return one without values."""
        return cls(bounds, [0] * (len(bounds) + 1))

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def merged(self, other: Histogram) -> Histogram:
        """Return both as one. Bounds may differ between versions; each count keeps its upper bound."""
        counts: Counter[float] = Counter()
        for histogram in (self, other):
            if histogram.counts:
                counts.update(dict(zip((*histogram.bounds, math.inf), histogram.counts, strict=True)))
        bounds = sorted(bound for bound in counts if bound != math.inf)
        return Histogram(tuple(bounds), [counts[bound] for bound in (*bounds, math.inf)], self.sum + other.sum)

    def cumulative(self) -> list[tuple[str, int]]:
        """Return, by upper bound as text ("+Inf" the last), how many values are at most that, as in Prometheus."""
        bounds = (*map(str, self.bounds), "+Inf")
        return list(zip(bounds, itertools.accumulate(self.counts), strict=True))

    def quantile(self, share: float) -> float:
        """An upper bound of that share of the values, as fine as the buckets; 0 without any, ``inf`` past the last."""
        rank, total = share * self.count, 0
        for index, count in enumerate(self.counts):
            total += count
            if count and total >= rank:
                return self.bounds[index] if index < len(self.bounds) else float("inf")
        return 0.0


class EngineStats(msgspec.Struct, omit_defaults=True):
    """Counts of an engine's worker process since its start. All of them only increase.

    Args:
        num_finished: requests that ended here, by finish reason; not those whose streamed input ended between two
            segments, when no engine holds them.
        num_prompt_tokens, num_cached_tokens: prompt tokens, counted at the engine that generates the first token;
            the latter were in its KV cache. A resumed request is not counted again.
        num_output_tokens: as this engine generates them.
        prefix_cache_queries, prefix_cache_hits: tokens looked up, and present, in the KV cache.
        num_prefill_tokens, num_decode_tokens: computed; recomputed ones count again.
        token_time_s: mean time between tokens, one value for each request of at least two.
        inference_time_s: prefill and decode together.
        num_prompt_tokens_of, num_output_tokens_of: per ended request, including tokens of former engines.
        num_step_tokens: computed by each step.
        step_tokens_squared, step_token_seconds: sums over steps of their tokens squared, and of tokens times execution
            seconds. With the sums of both they give the time that a token adds to a step.
        num_draft_tokens, num_accepted_tokens: draft tokens of the engine, and accepted ones.
        kv_offload: counts of blocks stored outside the KV cache, if any are.
        images: counts of an engine that reads images.

    The histograms of requests count each segment of a streamed input, so they may hold more than ``num_finished``.
    """

    num_finished: dict[str, int] = {}
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    schedule_time_s: float = 0.0
    execute_time_s: float = 0.0
    update_time_s: float = 0.0
    step_time_s: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(STEP_TIME_S))
    inter_token_latency_s: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(TOKEN_TIME_S))
    time_to_first_token_s: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(FIRST_TOKEN_TIME_S))
    queue_time_s: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(REQUEST_TIME_S))
    prefill_time_s: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(REQUEST_TIME_S))
    decode_time_s: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(REQUEST_TIME_S))
    latency_s: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(REQUEST_TIME_S))
    token_time_s: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(TOKEN_TIME_S))
    inference_time_s: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(REQUEST_TIME_S))
    num_prompt_tokens_of: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(REQUEST_TOKENS))
    num_output_tokens_of: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(REQUEST_TOKENS))
    num_step_tokens: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(STEP_TOKENS))
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    kv_offload: KVOffloadStats | None = None
    images: ImageStats | None = None
    step_tokens_squared: int = 0
    step_token_seconds: float = 0.0


class ImageStats(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """Counters run since the core's start; new fields are only appended and have a default.

    Args:
        num_cache_hits: images of requests whose features were kept from an earlier one.
        num_encoded: images whose features the vision encoder computed: the cache's misses.
        num_processed: those whose bytes were decoded and cut into patches; fewer than ``num_encoded`` where a
            processed image was kept longer than its features.
        memory_bytes: current size of the cache.
    """

    num_cache_hits: int = 0
    num_encoded: int = 0
    num_processed: int = 0
    memory_bytes: int = 0


class KVOffloadStats(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """Counters run since the core's start; new fields are only appended and have a default.

    Args:
        num_queried_tokens: tokens of prompts and resumed requests that were looked up because the KV cache lacked them.
        num_hit_tokens: tokens of them that were read.
        num_read_bytes, num_written_bytes: of keys and values.
        num_dropped_blocks: blocks that were not stored: the content was overwritten too soon, or not written.
        num_corrupt_blocks: blocks that differed from the written ones, and were computed again.
        memory_bytes: current size of the blocks in host memory.
        dir_bytes: current size of the blocks in the folder, including those of other engines.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_read_bytes: int = 0
    num_written_bytes: int = 0
    num_dropped_blocks: int = 0
    num_corrupt_blocks: int = 0
    memory_bytes: int = 0
    dir_bytes: int = 0


class RecordedStep(msgspec.Struct, frozen=True, gc=False):
    """Time and counts of one step.

    Args:
        ended_s: by the host's monotonic clock, which all engines of a host share.
        took_s: from the end of the last step if it left requests, so including the time between steps.
    """

    ended_s: float
    took_s: float
    stats: StepStats


def encode_steps(steps: Iterable[RecordedStep]) -> bytes:
    """Return lines of JSON, one for each step."""
    return _encoder.encode_lines(steps)


def decode_steps(data: bytes) -> list[RecordedStep]:
    """Return the steps of a file. Raises ``ConfigurationError`` for other files; an incomplete last line is ignored."""
    whole = data[: data.rfind(b"\n") + 1]
    try:
        return msgspec.json.Decoder(RecordedStep).decode_lines(whole)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"this is no file of an engine's steps: {error}") from error
