"""Statistics of a queue, for people and programs."""

from __future__ import annotations

import enum

import msgspec

from .lifecycle import RequestState


class ModelState(enum.StrEnum):
    """State of a model, in the words of llama.cpp's router. It is loaded if an engine claims.

    It is broken if no engine is left, and every device has given it up.
    """

    LOADED = "loaded"
    LOADING = "loading"
    ASLEEP = "asleep"
    UNLOADED = "unloaded"
    BROKEN = "broken"


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """When a model can be served.

    Args:
        in_s: expected time until an engine claims: 0 while one does; None if none does, and no device may wake one.
        num_seqs: requests that this engine will run at the same time; 0 if unknown.
        error: why a broken model cannot be served; else empty.
    """

    state: ModelState = ModelState.UNLOADED
    in_s: float | None = None
    num_seqs: int = 0
    error: str = ""


class LaneStats(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one tenant in one band. ``num_tokens`` counts prompts and ``max_tokens``."""

    band: str
    depth: int
    num_tokens: int
    oldest_age_s: float
    # Estimated wait of the newest of them, as in ``QueueStats``.
    estimated_wait_s: float | None


class TenantStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one tenant. ``num_running`` counts requests that have started and not ended.

    ``blocked_for_s`` is 0 within its quotas, else how long it is over one; ``inf``: until one of its requests ends.
    """

    tenant: str
    weight: float
    num_running: int
    blocked_for_s: float
    lanes: list[LaneStats]

    @property
    def depth(self) -> int:
        return sum(lane.depth for lane in self.lanes)


class BandStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of all tenants of one band; ``num_tenants`` counts those within their quotas."""

    band: str
    depth: int
    num_tokens: int
    num_tenants: int
    oldest_age_s: float
    estimated_wait_s: float | None


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one model's queue.

    Args:
        paused_at: Unix time in seconds since when no request is claimed; None if the queue is not paused.
        depth: waiting requests, including those that wait for their next engine (``num_returned``).
        num_tokens: prompts and ``max_tokens`` of those that were never claimed.
        oldest_age_s: age of the oldest request of tenants within their quotas.
        estimated_wait_s: estimated wait of a request that arrives now in the default band
            (``shared/queue/estimate.py``). Half of them wait for less, since tenants differ; of several partitions it
            is the mean. While the model sleeps it includes the time until it is awake. None while the queue is paused,
            no engine claims and none can be woken, none has ended a request yet, or bands above leave it nothing.
        requests_per_s: rate of ends in the last half minute or so, with ``tokens_per_s`` (prompts and ``max_tokens``);
            both fall to zero while nothing is served.
        tenants: empty unless requested.
        num_awaiting_input: resumable requests that neither wait nor run: they have answered all the input they have.
        num_warm: requests so far whose conversation an engine had in its cache when they came; ``num_warm_kept`` of
            them went to that engine.
        num_engines: live engines that claim.
        full_tokens_per_s: ``tokens_per_s`` if all of these engines were full; 0 while unknown.
        readiness: whether engines of the model claim, and when they will.
    """

    model: str
    paused_at: float | None
    depth: int
    num_tokens: int
    num_running: int
    num_returned: int
    oldest_age_s: float
    estimated_wait_s: float | None
    requests_per_s: float
    tokens_per_s: float
    mean_output_tokens: float
    bands: list[BandStats]
    tenants: list[TenantStats] = []
    num_awaiting_input: int = 0
    num_warm: int = 0
    num_warm_kept: int = 0
    num_engines: int = 0
    full_tokens_per_s: float = 0.0
    readiness: Readiness = Readiness()

    @property
    def is_paused(self) -> bool:
        return self.paused_at is not None

    @property
    def engine_tokens_per_s(self) -> float | None:
        """The part of one engine of ``full_tokens_per_s``; None while that is unknown."""
        return self.full_tokens_per_s / self.num_engines if self.num_engines and self.full_tokens_per_s else None


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one request.

    Args:
        position: requests of its tenant and band before it, 0 for the next; at most so many, since some may have been
            cancelled. None if it does not wait.
        estimated_start_s: in about how many seconds it is going to start; None if it does not wait, or as
            ``QueueStats.estimated_wait_s``.
        num_attempts: number of claims so far.
        deadline: Unix time in seconds at which it expires; None without one.
        num_engines: that serve its model, or start to; with 0 it waits until one does. None where nobody has counted.
        readiness: when its model can be served; None if the request does not wait.
    """

    request_id: str
    state: RequestState
    tenant: str
    band: str
    position: int | None
    estimated_start_s: float | None
    num_output_tokens: int
    num_attempts: int
    engine_id: str
    deadline: float | None
    num_engines: int | None = None
    readiness: Readiness | None = None
