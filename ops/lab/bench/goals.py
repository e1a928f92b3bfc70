"""The goals that the rows are held against, and whether they are met."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from .engines.gateway_row import GatewayRow
from .engines.growth import GrowthRow
from .engines.pooling import PoolingRow
from .engines.row import EngineRow
from .engines.sessions import SessionsRow
from .engines.sides import (
    ALONE,
    ALONE_DETERMINISTIC,
    ALONE_INT4,
    ALONE_INT8,
    ALONE_MIXED,
    LLAMA,
    LLAMA_Q4,
    LLAMA_Q4_K,
    LLAMA_Q8,
    SERVED,
    VLLM_ASYNC,
    VLLM_HTTP,
    VLLM_OFFLINE,
    VLLM_SERVED,
)
from .queue.enqueue import EnqueueRow
from .queue.figures import FiguresRow
from .queue.fleet import FleetRow
from .queue.follow import FollowRow
from .result import median_ratio

MIN_THROUGHPUT_OVER_VLLM = {"tiny": 2.0, "smol135": 1.2, "qwen06": 1.2}
MIN_INT8_OVER_VLLM = {"smol135": 1.6, "qwen06": 1.6}
MAX_INT4_SINGLE_OVER_ALONE = {"smol135": 0.35, "qwen06": 0.35}
MIN_DETERMINISTIC_OVER_ALONE = {"tiny": 0.95, "smol135": 0.95, "qwen06": 0.95}
MAX_PROMPT_OVER_VLLM = {"smol135": 0.8, "qwen06": 0.8}
MAX_SINGLE_OVER_VLLM = {"smol135": 0.45, "qwen06": 0.6}
MAX_SINGLE_OVER_LLAMA = {"smol135": 1.0, "qwen06": 1.0}
# The same bits a weight on both sides, or about.
MIN_QUANTIZED_OVER_LLAMA = {"smol135": 1.5, "qwen06": 1.5}
MIN_SERVED_OVER_ALONE = {"smol135": 0.97, "tiny": 0.9}
MAX_ITL_P99_OVER_VLLM = {"smol135": 0.3}
MAX_ADDED_TTFT_MS = 2.0
MIN_ADAPTER_OVER_VLLM = 1.0
MIN_GATEWAY_OVER_CLIENT = 0.85
MAX_READY_OVER_VLLM = 0.1
MAX_RSS_OVER_VLLM = 0.4
# The most engines over one.
MAX_FLEET_P50_RATIO = 1.5
MAX_FLEET_REDIS_RATIO = 3.0
# Of the Redis CPU of enqueue, claim and finish.
MAX_EVENTS_SHARE = 0.05
# Share of the cached tokens of the turn before with free capacity, and fairness without it.
MIN_SESSION_HITS = 0.9
MIN_SESSION_JAIN_RATIO = 0.97
# By the rows of queue_enqueue, in order: one at a time, many tasks, in bulk over a queue, in bulk over plain entries.
MIN_ENQUEUE_OVER_RIVAL = (None, 2.0, 1.0, 0.5)
MIN_FOLLOWED_DELTAS_PER_S = 50_000
# "Flat": a request of a batch of 512 costs the scheduler at most so much more than one of the cheapest batch.
MAX_GROWTH = 1.5


class State(StrEnum):
    """State of a goal."""

    MET = "met"
    NOT_MET = "not met"
    NOT_MEASURED = "not measured"


class Goal(msgspec.Struct, kw_only=True):
    """``value`` is None where a side is missing or wrong; ``state`` follows from it."""

    model: str
    what: str
    value: float | None
    at_least: float | None = None
    at_most: float | None = None
    state: State = State.NOT_MEASURED

    def __post_init__(self) -> None:
        if self.value is not None:
            is_met = (self.at_least is None or self.value >= self.at_least) and (
                self.at_most is None or self.value <= self.at_most
            )
            self.state = State.MET if is_met else State.NOT_MET

    @property
    def limit(self) -> str:
        """The limit as printed."""
        return f"≥ {self.at_least:,g}" if self.at_least is not None else f"≤ {self.at_most:,g}"


def engine_goals(row: EngineRow) -> Iterator[Goal]:
    """Yield the goals of a model's row."""
    model = row.model

    def at_least(what: str, value: float | None, limits: dict[str, float]) -> Iterator[Goal]:
        if model in limits:
            yield Goal(model=model, what=what, value=value, at_least=limits[model])

    def at_most(what: str, value: float | None, limits: dict[str, float]) -> Iterator[Goal]:
        if model in limits:
            yield Goal(model=model, what=what, value=value, at_most=limits[model])

    everything, single = "tokens_per_s", "single_ms_per_token"
    of_vllm = row.ratio(ALONE, VLLM_OFFLINE, everything)
    yield from at_least("tokens/s, alone over vLLM offline", of_vllm, MIN_THROUGHPUT_OVER_VLLM)
    of_vllm = row.ratio(ALONE_INT8, VLLM_OFFLINE, everything)
    yield from at_least("tokens/s, alone with int8 over vLLM offline", of_vllm, MIN_INT8_OVER_VLLM)
    of_alone = row.ratio(ALONE_INT4, ALONE, single)
    yield from at_most("one request, ms/token, alone with int4 over alone", of_alone, MAX_INT4_SINGLE_OVER_ALONE)
    of_alone = row.ratio(ALONE_DETERMINISTIC, ALONE, everything)
    yield from at_least("tokens/s, alone and deterministic over alone", of_alone, MIN_DETERMINISTIC_OVER_ALONE)
    of_vllm = row.ratio(ALONE, VLLM_OFFLINE, "single_ttft_ms")
    yield from at_most("prompt of 128 tokens, ms, alone over vLLM offline", of_vllm, MAX_PROMPT_OVER_VLLM)
    of_vllm = row.ratio(ALONE, VLLM_OFFLINE, single)
    yield from at_most("one request, ms/token, alone over vLLM offline", of_vllm, MAX_SINGLE_OVER_VLLM)
    of_llama = row.ratio(ALONE, LLAMA, single)
    yield from at_most("one request, ms/token, alone over llama.cpp", of_llama, MAX_SINGLE_OVER_LLAMA)
    for ours, quantization, theirs in (
        (ALONE_INT8, "int8", LLAMA_Q8),
        (ALONE_MIXED, "int4-mixed", LLAMA_Q4_K),
        (ALONE_INT4, "int4", LLAMA_Q4),
    ):
        between = f"alone with {quantization} over {theirs}"
        yield from at_most(f"one request, ms/token, {between}", row.ratio(ours, theirs, single), MAX_SINGLE_OVER_LLAMA)
        yield from at_least(f"tokens/s, {between}", row.ratio(ours, theirs, everything), MIN_QUANTIZED_OVER_LLAMA)
    of_alone = row.ratio(SERVED, ALONE, everything)
    yield from at_least("tokens/s, through Redis over alone", of_alone, MIN_SERVED_OVER_ALONE)
    of_async = row.ratio(SERVED, VLLM_ASYNC, "itl_p99_ms")
    yield from at_most("ITL p99 of all at once, through Redis over vLLM async", of_async, MAX_ITL_P99_OVER_VLLM)
    yield Goal(
        model=model, what="TTFT added by Redis at idle, p50, ms", value=added_ttft_ms(row), at_most=MAX_ADDED_TTFT_MS
    )
    for ours, rival in ((ALONE, VLLM_OFFLINE), (SERVED, VLLM_HTTP)):
        between = f"{ours} over {rival}"
        ready, rss = row.ratio(ours, rival, "ready_s"), row.ratio(ours, rival, "rss_bytes")
        yield Goal(model=model, what=f"ready, {between}", value=ready, at_most=MAX_READY_OVER_VLLM)
        yield Goal(model=model, what=f"RSS, {between}", value=rss, at_most=MAX_RSS_OVER_VLLM)


def added_ttft_ms(row: EngineRow) -> float | None:
    """Return the time that the path through Redis adds to the first token of a single request."""
    served, alone = row.side(SERVED), row.side(ALONE)
    if served is None or alone is None or not served.rounds or not alone.rounds:
        return None
    differences = sorted(s.idle_ttft_ms - a.idle_ttft_ms for s, a in zip(served.rounds, alone.rounds, strict=True))
    return differences[len(differences) // 2]


def adapter_goals(row: EngineRow) -> Iterator[Goal]:
    """Yield goals of vLLM's speed behind our queue, compared with its own server."""
    ratio = row.ratio(VLLM_SERVED, VLLM_HTTP, "tokens_per_s")
    what = f"tokens/s of {row.num_requests} streams, {VLLM_SERVED} over {VLLM_HTTP}"
    yield Goal(model=row.model, what=what, value=ratio, at_least=MIN_ADAPTER_OVER_VLLM)
    ours, theirs = row.side(VLLM_SERVED), row.side(VLLM_HTTP)
    added = None
    if ours is not None and theirs is not None and ours.rounds and theirs.rounds:
        pairs = zip(ours.rounds, theirs.rounds, strict=True)
        added = statistics.median(a.idle_ttft_ms - b.idle_ttft_ms for a, b in pairs)
    what = f"TTFT at idle, p50, ms: {VLLM_SERVED} less {VLLM_HTTP}"
    yield Goal(model=row.model, what=what, value=added, at_most=MAX_ADDED_TTFT_MS)


def gateway_goals(row: GatewayRow) -> Iterator[Goal]:
    """Yield goals of the throughput over HTTP, relative to the client's."""
    what = f"tokens/s of {row.num_streams} streams, through the gateway over the client's own"
    yield Goal(model=row.model, what=what, value=row.ratio, at_least=MIN_GATEWAY_OVER_CLIENT)


def growth_goals(row: GrowthRow) -> Iterator[Goal]:
    """Yield goals of the scheduler's time per request, independent of the number of requests."""
    costs = [size.scheduler_us_per_request for size in row.sizes]
    yield Goal(
        model=row.model,
        what=f"scheduler µs per request at {row.sizes[-1].num_running} running over the least",
        value=costs[-1] / min(costs),
        at_most=MAX_GROWTH,
    )


def pooling_goals(row: PoolingRow) -> Iterator[Goal]:
    """Yield goals of packing's gain, and of the cost of the path through Redis."""
    for what, ours, theirs, at_least in (
        ("texts/s, through Redis over transformers in order of arrival", row.through_redis, row.arrival, 1.5),
        ("texts/s, through Redis over transformers sorted", row.through_redis, row.sorted, 1.0),
        ("texts/s, through Redis over alone", row.through_redis, row.alone, 0.9),
    ):
        yield Goal(model=row.model, what=what, value=median_ratio(ours, theirs), at_least=at_least)


def follow_goals(row: FollowRow) -> Iterator[Goal]:
    """Yield goals of one client process's throughput."""
    yield Goal(
        model="none",
        what=f"deltas/s that one client takes from {row.num_streams:,} streams",
        value=row.deltas_per_s,
        at_least=MIN_FOLLOWED_DELTAS_PER_S,
    )


def sessions_goals(row: SessionsRow) -> Iterator[Goal]:
    """Yield goals of conversations' cache hits, and of fairness to other tenants."""
    for load in row.loads:
        if load.name == "room":
            what = f"tokens found of the turn before, {load.num_sessions} sessions"
            yield Goal(model=row.model, what=what, value=load.warm.hit_share, at_least=MIN_SESSION_HITS)
        else:  # without waiting requests, fairness depends only on think times
            what = f"Jain's index of tenants, warm over plain, {load.num_sessions} sessions"
            ratio = load.warm.jain / load.plain.jain
            yield Goal(model=row.model, what=what, value=ratio, at_least=MIN_SESSION_JAIN_RATIO)


def fleet_goals(row: FleetRow) -> Iterator[Goal]:
    """Yield goals of the cost of a request, independent of the number of engines."""
    most, least = row.sizes[-1].num_engines, row.sizes[0].num_engines
    over = f"of {most:,} engines over {least}"
    yield Goal(model="none", what=f"enqueue to claim p50 {over}", value=row.p50_ratio, at_most=MAX_FLEET_P50_RATIO)
    yield Goal(model="none", what=f"Redis CPU a request {over}", value=row.redis_ratio, at_most=MAX_FLEET_REDIS_RATIO)


def figures_goals(row: FiguresRow) -> Iterator[Goal]:
    """Yield goals of the cost of events per request."""
    for cost in row.events:
        what = f"what events add to a request's Redis CPU, calls of {cost.at_once}"
        yield Goal(model="none", what=what, value=cost.share, at_most=MAX_EVENTS_SHARE)


def enqueue_goals(row: EnqueueRow) -> Iterator[Goal]:
    """Yield goals of the speed of enqueueing."""
    for pairing, limit in zip(row.pairings, MIN_ENQUEUE_OVER_RIVAL, strict=True):
        if limit is not None:
            what = f"requests/s, {pairing.way} over {pairing.rival}"
            yield Goal(model="none", what=what, value=pairing.ratio, at_least=limit)
