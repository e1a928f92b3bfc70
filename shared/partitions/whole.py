"""Queue, dead letter and history of a model with several partitions, as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from ..broker import DeadLetter, Demand, Homes, Queue, RequestFilter, RequestHistory
from ..broker.ledger import DAY_S, Ledger, LedgerRow
from ..broker.queue import QueueSnapshot, make_stats
from ..broker.script import run_script
from ..broker.series import SeriesPoint, SeriesStore, summed_points
from ..connection import CommandConnection
from ..deployment.records import DeadRequest
from ..errors import ValidationError
from ..keys import Keys
from ..queue.estimate import Estimator
from ..queue.lifecycle import RequestEvent, RequestState, RequestSummary
from ..queue.policy import QueuePolicy, RateLimit, RateLimits, TenantPolicy
from ..queue.state import merged_state
from ..queue.stats import BandStats, LaneStats, QueueStats, RequestStatus, TenantStats
from .layout import Layouts

T = TypeVar("T")


async def open_queue(connection: CommandConnection, keys: Keys, model: str) -> Queue:
    """Return a model's queue as a whole, over its current partitions."""
    num = (await Layouts(connection, keys).read(model)).num_known
    return Queue(connection, keys.model(model)) if num == 1 else WholeQueue(connection, keys, model, num)


async def open_dead_letter(connection: CommandConnection, keys: Keys, model: str) -> DeadLetter:
    """Return a model's dead letter as a whole, over its current partitions."""
    num = (await Layouts(connection, keys).read(model)).num_known
    return DeadLetter(connection, keys.model(model)) if num == 1 else WholeDeadLetter(connection, keys, model, num)


async def open_homes(connection: CommandConnection, keys: Keys, model: str) -> Homes:
    """Return the homes of a model as a whole, over its current partitions."""
    num = (await Layouts(connection, keys).read(model)).num_known
    return Homes(connection, keys.model(model)) if num == 1 else WholeHomes(connection, keys, model, num)


async def partition_stats(connection: CommandConnection, keys: Keys, model: str, num: int) -> list[QueueStats]:
    """Return the state of each partition."""
    return await asyncio.gather(*(Queue(connection, keys.model(model, number)).stats() for number in range(num)))


class WholeQueue(Queue):
    """Several partitions as one queue: changes are made in all; policies are read from the first."""

    def __init__(self, connection: CommandConnection, keys: Keys, model: str, num: int) -> None:
        super().__init__(connection, keys.model(model))
        self._parts = [Queue(connection, keys.model(model, number)) for number in range(num)]

    async def stats(self, *, tenants: bool | Sequence[str] = False) -> QueueStats:
        snapshots = await asyncio.gather(*(part.read_snapshot(tenants=tenants) for part in self._parts))
        return summed(snapshots)

    async def status(self, request_id: str) -> RequestStatus | None:
        statuses = await asyncio.gather(*(part.status(request_id) for part in self._parts))
        return next((status for status in statuses if status is not None), None)

    async def pause(self, *, put_back: bool, abort: bool = False) -> int:
        return sum(await asyncio.gather(*(part.pause(put_back=put_back, abort=abort) for part in self._parts)))

    async def resume(self) -> bool:
        return any(await asyncio.gather(*(part.resume() for part in self._parts)))

    async def is_paused(self) -> bool:
        return any(await asyncio.gather(*(part.is_paused() for part in self._parts)))

    async def purge(self, tenant: str, band: str = "") -> int:
        return sum(await asyncio.gather(*(part.purge(tenant, band) for part in self._parts)))

    async def tenants(self) -> list[str]:
        by_partition = await asyncio.gather(*(part.tenants() for part in self._parts))
        return sorted({tenant for tenants in by_partition for tenant in tenants})

    async def configure(self, policy: QueuePolicy) -> None:
        bands = (await self.stats()).bands
        if occupied := [band.band for band in bands if band.depth and band.band not in policy.bands]:
            names = ", ".join(occupied)
            raise ValidationError(f"bands must keep {names} while requests wait there, got {', '.join(policy.bands)}")
        for part in self._parts:
            await part.configure(policy)

    async def configure_tenant(self, tenant: str, policy: TenantPolicy | None) -> None:
        for part in self._parts:
            await part.configure_tenant(tenant, policy)


class WholeHomes(Homes):
    """Homes of all partitions. Each device enters all of them; the first one grants."""

    def __init__(self, connection: CommandConnection, keys: Keys, model: str, num: int) -> None:
        super().__init__(connection, keys.model(model))
        self._parts = [Homes(connection, keys.model(model, number)) for number in range(num)]

    async def demand(self) -> Demand:
        return summed_demand(await asyncio.gather(*(part.demand() for part in self._parts)))

    async def _enter(self, *args: str | int) -> None:
        await asyncio.gather(*(part._enter(*args) for part in self._parts))


def summed_demand(parts: Sequence[Demand]) -> Demand:
    """Return the demand for the whole model."""
    first = parts[0]
    bands = {band for part in parts for band in part.oldest_age_s}
    return msgspec.structs.replace(
        first,
        is_paused=any(part.is_paused for part in parts),
        num_waiting={band: sum(part.num_waiting.get(band, 0) for part in parts) for band in bands},
        num_tokens=sum(part.num_tokens for part in parts),
        num_returned=sum(part.num_returned for part in parts),
        num_running=sum(part.num_running for part in parts),
        deadline_in_s=min(part.deadline_in_s for part in parts),
        oldest_age_s={band: max(part.oldest_age_s.get(band, 0.0) for part in parts) for band in bands},
        # Engines claim from several partitions, each of which knows the whole capacity of those that it has.
        num_engines=max(part.num_engines for part in parts),
        num_free_seqs=max(part.num_free_seqs for part in parts),
    )


class WholeDeadLetter(DeadLetter):
    """Parked requests of all partitions. A request is parked, and replayed, in its partition."""

    def __init__(self, connection: CommandConnection, keys: Keys, model: str, num: int) -> None:
        super().__init__(connection, keys.model(model))
        self._parts = [DeadLetter(connection, keys.model(model, number)) for number in range(num)]

    async def ids(self) -> list[str]:
        return [one for ids in await asyncio.gather(*(part.ids() for part in self._parts)) for one in ids]

    async def list(self) -> list[DeadRequest]:
        lists = await asyncio.gather(*(part.list() for part in self._parts))
        return sorted((request for parked in lists for request in parked), key=lambda request: request.parked_at)

    async def count(self) -> int:
        return sum(await asyncio.gather(*(part.count() for part in self._parts)))

    async def newest(self, limit: int) -> Sequence[tuple[str, float]]:
        lists = await asyncio.gather(*(part.newest(limit) for part in self._parts))
        return sorted((one for parked in lists for one in parked), key=lambda one: -one[1])[:limit]

    async def show(self, request_id: str) -> DeadRequest | None:
        requests = await asyncio.gather(*(part.show(request_id) for part in self._parts))
        return next((parked for parked in requests if parked is not None), None)

    async def replay(self, request_id: str) -> bool:
        return any(await asyncio.gather(*(part.replay(request_id) for part in self._parts)))

    async def purge(self, request_id: str) -> bool:
        return any(await asyncio.gather(*(part.purge(request_id) for part in self._parts)))


def summed(snapshots: Sequence[QueueSnapshot]) -> QueueStats:
    """Return the state of the whole. Engines help out in the longest queue, so all of them serve all requests."""
    parts, first = [make_stats(snapshot) for snapshot in snapshots], snapshots[0]
    estimator = Estimator(merged_state([snapshot.state for snapshot in snapshots]))
    bands = _summed_bands(parts, estimator)
    requests_per_s = sum(part.requests_per_s for part in parts)
    mean = sum(part.mean_output_tokens * part.requests_per_s for part in parts)
    paused = [part.paused_at for part in parts if part.paused_at is not None]
    return QueueStats(
        model=first.model,
        paused_at=min(paused, default=None),
        depth=_sum(parts, lambda part: part.depth),
        num_tokens=_sum(parts, lambda part: part.num_tokens),
        num_running=_sum(parts, lambda part: part.num_running),
        num_returned=_sum(parts, lambda part: part.num_returned),
        oldest_age_s=max(part.oldest_age_s for part in parts),
        estimated_wait_s=next((band.estimated_wait_s for band in bands if band.band == first.default_band), None),
        requests_per_s=requests_per_s,
        tokens_per_s=sum(part.tokens_per_s for part in parts),
        mean_output_tokens=mean / requests_per_s if requests_per_s else first.mean_output_tokens,
        bands=bands,
        tenants=_merged_tenants(tenant for part in parts for tenant in part.tenants),
        num_awaiting_input=_sum(parts, lambda part: part.num_awaiting_input),
        num_warm=_sum(parts, lambda part: part.num_warm),
        num_warm_kept=_sum(parts, lambda part: part.num_warm_kept),
        num_engines=max(part.num_engines for part in parts),
        full_tokens_per_s=estimator.tokens_per_s,
        readiness=first.readiness,
    )


def _sum(parts: Iterable[T], number: Callable[[T], int]) -> int:
    return sum(map(number, parts))


def _summed_bands(parts: Sequence[QueueStats], estimator: Estimator) -> list[BandStats]:
    bands: list[BandStats] = []
    for name in [band.band for band in parts[0].bands]:
        same = [band for part in parts for band in part.bands if band.band == name]
        bands.append(
            BandStats(
                band=name,
                depth=_sum(same, lambda band: band.depth),
                num_tokens=_sum(same, lambda band: band.num_tokens),
                num_tenants=_sum(same, lambda band: band.num_tenants),
                oldest_age_s=max(band.oldest_age_s for band in same),
                estimated_wait_s=estimator.band_s(name),
            )
        )
    return bands


def _merged_tenants(found: Iterable[TenantStats]) -> list[TenantStats]:
    """Merge a tenant's parts in several partitions: it is spread, or has just got another one."""
    tenants: dict[str, TenantStats] = {}
    for tenant in found:
        before = tenants.get(tenant.tenant)
        tenants[tenant.tenant] = tenant if before is None else _merged(before, tenant)
    return sorted(tenants.values(), key=lambda tenant: (-tenant.depth, tenant.tenant))


def _merged(one: TenantStats, other: TenantStats) -> TenantStats:
    lanes = {lane.band: lane for lane in one.lanes}
    for lane in other.lanes:
        before = lanes.get(lane.band)
        lanes[lane.band] = lane if before is None else _merged_lanes(before, lane)
    return msgspec.structs.replace(
        one,
        num_running=one.num_running + other.num_running,
        blocked_for_s=min(one.blocked_for_s, other.blocked_for_s),
        lanes=[*lanes.values()],
    )


def _merged_lanes(one: LaneStats, other: LaneStats) -> LaneStats:
    waits = [lane.estimated_wait_s for lane in (one, other) if lane.estimated_wait_s is not None]
    return msgspec.structs.replace(
        one,
        depth=one.depth + other.depth,
        num_tokens=one.num_tokens + other.num_tokens,
        oldest_age_s=max(one.oldest_age_s, other.oldest_age_s),
        estimated_wait_s=max(waits, default=None),
    )


async def open_history(connection: CommandConnection, keys: Keys, model: str) -> RequestHistory:
    """Return the history of a model's requests over its current partitions."""
    num = (await Layouts(connection, keys).read(model)).num_ever
    return RequestHistory(connection, keys.model(model)) if num == 1 else WholeHistory(connection, keys, model, num)


async def read_series(
    connection: CommandConnection, keys: Keys, model: str, *, hours: float, step_s: int | None = None
) -> list[SeriesPoint]:
    """Return the counts of a model over all partitions; as ``SeriesStore.read``."""
    num = (await Layouts(connection, keys).read(model)).num_ever
    stores = [SeriesStore(connection, keys.model(model, number)) for number in range(num)]
    return summed_points(await asyncio.gather(*(store.read(hours=hours, step_s=step_s) for store in stores)))


async def read_ledger(
    connection: CommandConnection, keys: Keys, model: str, start: int, end: int, *, step_s: int = DAY_S
) -> list[LedgerRow]:
    """Return the use of a model over all partitions; as ``Ledger.read``."""
    num = (await Layouts(connection, keys).read(model)).num_ever
    ledger = Ledger(connection, [keys.model(model, number) for number in range(num)])
    return await ledger.read(start, end, step_s=step_s)


async def read_rate_limits(connection: CommandConnection, keys: Keys, model: str, tenant: str) -> RateLimits | None:
    """Return the quotas per minute of a tenant in its partition; None without any."""
    layout = await Layouts(connection, keys).read(model)
    part = keys.model(model, layout.partition_of(tenant, tenant))
    row = await run_script(connection, part, "rate_limits", [part.leases], [tenant])
    if row is None:
        return None
    requests, tokens = (RateLimit(most, left) if most else None for most, left in (row[:2], row[2:4]))
    return RateLimits(requests, tokens, row[4])


class WholeHistory(RequestHistory):
    """Several partitions as one. Events of different partitions are in order by the clocks of their servers alone, so
    who follows them may miss one of a server whose clock is behind."""

    def __init__(self, connection: CommandConnection, keys: Keys, model: str, num: int) -> None:
        super().__init__(connection, keys.model(model))
        self._parts = [RequestHistory(connection, keys.model(model, number)) for number in range(num)]

    @property
    def parts(self) -> Sequence[RequestHistory]:
        return self._parts

    async def events(self, *, after: str = "0-0", limit: int = 500) -> list[RequestEvent]:
        by_partition = await asyncio.gather(*(part.events(after=after, limit=limit) for part in self._parts))
        return sorted((event for events in by_partition for event in events), key=lambda event: event.place)[:limit]

    async def last_event_id(self) -> str:
        event_ids = await asyncio.gather(*(part.last_event_id() for part in self._parts))
        return max(event_ids, key=lambda event_id: tuple(map(int, event_id.split("-"))))

    async def history(self, request_id: str) -> list[RequestEvent]:
        histories = await asyncio.gather(*(part.history(request_id) for part in self._parts))
        return next((events for events in histories if events), [])

    async def find(self, request_id: str) -> RequestSummary | None:
        summaries = await asyncio.gather(*(part.find(request_id) for part in self._parts))
        return next((request for request in summaries if request is not None), None)

    async def requests(self, selection: RequestFilter = RequestFilter(), *, limit: int = 100) -> list[RequestSummary]:  # noqa: B008  # frozen
        lists = await asyncio.gather(*(part.requests(selection, limit=limit) for part in self._parts))
        every = [request for requests in lists for request in requests]
        moved = [request for request in every if request.state is not RequestState.QUEUED]
        moved.sort(key=lambda request: -request.at)
        return [*moved, *(request for request in every if request.state is RequestState.QUEUED)][:limit]
