"""Operations on one model's whole queue: statistics, pausing, policies, purging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..connection import CommandConnection
from ..errors import ValidationError
from ..keys import ModelKeys
from ..queue.estimate import Estimator
from ..queue.lifecycle import RequestState
from ..queue.policy import QueuePolicy, TenantPolicy, decode_policy
from ..queue.state import LaneState, Limits, QueueState
from ..queue.stats import BandStats, LaneStats, QueueStats, Readiness, RequestStatus, TenantStats
from ..values.names import check_name
from ..values.shown import shown
from .homes import RawReadiness, readiness
from .measured import RawBand, RawMeasures, RawTenant, age_s, queue_state
from .script import refusing_damage, repairing, run_script

# Tenants or requests per script call, so that no call blocks the server for long.
PAGE = 500


class _RawStats(msgspec.Struct, array_like=True):
    """The reply of ``stats.lua``."""

    measures: RawMeasures
    mean_output: float
    default_band: str
    num_awaiting: int
    num_warm: int
    num_warm_kept: int
    readiness: RawReadiness


class _RawStatus(msgspec.Struct, array_like=True):
    """The reply of ``status.lua``."""

    state: RequestState
    tenant: str
    band: str
    count: int
    attempts: int
    engine: str
    deadline_ms: float
    ahead: int
    is_returned: int
    measures: RawMeasures | None
    owner: RawTenant
    readiness: RawReadiness | None


class QueueSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of a queue at one time: the state that waits are estimated from, the selected tenants, and counts."""

    model: str
    now_ms: float
    paused_at: float | None
    default_band: str
    state: QueueState
    bands: list[RawBand]
    tenants: list[RawTenant]
    mean_output_tokens: float
    num_awaiting_input: int
    num_warm: int
    num_warm_kept: int
    readiness: Readiness


class Queue:
    """All methods raise ``RedisUnavailableError`` when Redis is unavailable for longer than the connection retries."""

    def __init__(self, connection: CommandConnection, keys: ModelKeys) -> None:
        self._connection = connection
        self._keys = keys

    async def stats(self, *, tenants: bool | Sequence[str] = False) -> QueueStats:
        """Return the state of the queue; with ``tenants`` also of all or of these tenants, the deepest lanes first."""
        return make_stats(await self.read_snapshot(tenants=tenants))

    async def read_snapshot(self, *, tenants: bool | Sequence[str] = False) -> QueueSnapshot:
        """Read the data of ``stats``."""
        names = (await self.tenants() if tenants else []) if isinstance(tenants, bool) else tenants
        raw = msgspec.msgpack.decode(await self._run_on_queue("stats"), type=_RawStats)
        measures = raw.measures
        model_readiness = readiness(raw.readiness, measures.rooms[0])
        return QueueSnapshot(
            model=self._keys.name,
            now_ms=measures.now_ms,
            paused_at=measures.paused_at_ms / 1000 if measures.paused_at_ms else None,
            default_band=raw.default_band,
            state=queue_state(measures, model_readiness),
            bands=measures.bands,
            tenants=await self._read_tenants(names),
            mean_output_tokens=raw.mean_output,
            num_awaiting_input=raw.num_awaiting,
            num_warm=raw.num_warm,
            num_warm_kept=raw.num_warm_kept,
            readiness=model_readiness,
        )

    async def status(self, request_id: str) -> RequestStatus | None:
        """Return the state of a request and its position, or None if it is unknown or its result has expired.

        Raises:
            DamagedRecordError: something other than the scripts has written to its record.
        """
        own_keys = [self._keys.request(request_id)]
        reply = await run_script(self._connection, self._keys, "status", own_keys, [request_id])
        if reply is None:
            return None
        with refusing_damage(request_id, "record"):
            raw = msgspec.msgpack.decode(reply, type=_RawStatus)
        model_readiness = None
        if raw.measures is not None and raw.readiness is not None:
            model_readiness = readiness(raw.readiness, raw.measures.rooms[0])
        return RequestStatus(
            request_id=request_id,
            state=raw.state,
            tenant=raw.tenant,
            band=raw.band,
            position=raw.ahead if raw.ahead >= 0 else None,
            estimated_start_s=_estimated_start_s(raw, model_readiness),
            num_output_tokens=raw.count,
            num_attempts=raw.attempts,
            engine_id=raw.engine,
            deadline=raw.deadline_ms / 1000 if raw.deadline_ms else None,
            readiness=model_readiness,
        )

    async def pause(self, *, put_back: bool, abort: bool = False) -> int:
        """Stop claims until ``resume``, also across restarts. Return how many requests were running.

        Args:
            put_back: queue running requests again, to resume after their last token; otherwise they run to their end.
            abort: end running requests, and those that were queued again before, with finish_reason "abort".
        """
        return await self._run_on_queue("pause", 2 if abort else int(put_back))

    async def resume(self) -> bool:
        """Allow claims again. False if the queue was not paused."""
        return bool(await self._run_on_queue("resume"))

    async def is_paused(self) -> bool:
        return bool(await self._read_repaired("HEXISTS", self._keys.queue, "paused"))

    async def purge(self, tenant: str, band: str = "") -> int:
        """Cancel a tenant's waiting requests that never ran, in one band or all. Return how many.

        Raises:
            ValidationError: the band does not exist, or ``tenant`` is not a name.
        """
        check_name("tenant", tenant)
        bands = (await self.policy()).bands
        if band and band not in bands:
            raise ValidationError(f"band must be one of {', '.join(bands)}, got {shown(band)}")
        num_cancelled = 0
        while count := await self._run_on_queue("purge", tenant, band, PAGE):
            num_cancelled += count
        return num_cancelled

    async def tenants(self) -> list[str]:
        """Return the tenants with waiting or running requests."""
        return sorted(name.decode() for name in await self._read_repaired("SMEMBERS", self._keys.active_tenants))

    async def policy(self) -> QueuePolicy:
        """Return the queue's policy; the default one if none is configured."""
        data = await self._read_repaired("GET", self._keys.policy)
        return QueuePolicy() if data is None else decode_policy(data, QueuePolicy)

    async def configure(self, policy: QueuePolicy) -> None:
        """Set the queue's policy. It applies from the next enqueue and claim on, also to waiting requests.

        Raises:
            ValidationError: requests wait in a band that the policy lacks.
        """
        occupied = await self._run_on_queue("configure", policy.encode(), *policy.bands)
        if occupied:
            names = ", ".join(band.decode() for band in occupied)
            raise ValidationError(f"bands must keep {names} while requests wait there, got {', '.join(policy.bands)}")

    async def tenant_policies(self) -> dict[str, TenantPolicy]:
        """Return the policies of the tenants with one of their own."""
        flat = await self._read_repaired("HGETALL", self._keys.tenant_policies)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return {name.decode(): decode_policy(data, TenantPolicy) for name, data in pairs}

    async def tenant_policy(self, tenant: str) -> TenantPolicy | None:
        """Return a tenant's own policy; None if it has the queue's."""
        data = await self._read_repaired("HGET", self._keys.tenant_policies, check_name("tenant", tenant))
        return None if data is None else decode_policy(data, TenantPolicy)

    async def configure_tenant(self, tenant: str, policy: TenantPolicy | None) -> None:
        """Set a tenant's policy; None restores the queue's default."""
        await self._run_on_queue(
            "configure_tenant", check_name("tenant", tenant), b"" if policy is None else policy.encode()
        )

    async def _read_tenants(self, names: Sequence[str]) -> list[RawTenant]:
        tenants: list[RawTenant] = []
        for start in range(0, len(names), PAGE):
            reply = await self._run_on_queue("tenant_stats", *names[start : start + PAGE])
            tenants += msgspec.msgpack.decode(reply, type=list[RawTenant])
        return tenants

    async def _run_on_queue(self, name: str, *args: Any) -> Any:
        return await run_script(self._connection, self._keys, name, [self._keys.leases], list(args))

    async def _read_repaired(self, *command: Any) -> Any:
        return await repairing(self._connection, self._keys, lambda: self._connection.execute(*command))


def make_stats(snapshot: QueueSnapshot) -> QueueStats:
    """Return the statistics of a snapshot, with estimates of waits."""
    state, estimator = snapshot.state, Estimator(snapshot.state)
    rates = [band.rates for band in state.bands]
    bands = [
        BandStats(
            band=raw.band,
            depth=raw.depth,
            num_tokens=raw.num_tokens,
            num_tenants=raw.num_tenants,
            oldest_age_s=age_s(snapshot.now_ms, raw.oldest_ms),
            estimated_wait_s=estimator.band_s(raw.band),
        )
        for raw in snapshot.bands
    ]
    return QueueStats(
        model=snapshot.model,
        paused_at=snapshot.paused_at,
        depth=sum(band.depth for band in bands) + state.num_returned,
        num_tokens=sum(band.num_tokens for band in bands),
        num_running=state.num_running,
        num_returned=state.num_returned,
        oldest_age_s=max(band.oldest_age_s for band in bands),
        estimated_wait_s=next((band.estimated_wait_s for band in bands if band.band == snapshot.default_band), None),
        requests_per_s=sum(rate.ended_per_s for rate in rates),
        tokens_per_s=sum(rate.tokens_per_s for rate in rates),
        mean_output_tokens=snapshot.mean_output_tokens,
        bands=bands,
        tenants=_tenant_stats(snapshot, estimator),
        num_awaiting_input=snapshot.num_awaiting_input,
        num_warm=snapshot.num_warm,
        num_warm_kept=snapshot.num_warm_kept,
        num_engines=state.num_engines,
        full_tokens_per_s=estimator.tokens_per_s,
        readiness=snapshot.readiness,
    )


def _tenant_stats(snapshot: QueueSnapshot, estimator: Estimator) -> list[TenantStats]:
    by_band: dict[str, list[tuple[LaneState, Limits]]] = {}
    for tenant in snapshot.tenants:
        for band, lane in tenant.lane_states(snapshot.now_ms):
            by_band.setdefault(band, []).append((lane, tenant.limits_at(snapshot.now_ms)))
    waits = {
        (band, lane.tenant): wait_s
        for band, lanes in by_band.items()
        for (lane, _), wait_s in zip(lanes, estimator.lanes_s(band, lanes), strict=True)
    }
    tenants = [
        TenantStats(
            tenant=tenant.tenant,
            weight=tenant.limits[0],
            num_running=tenant.num_started,
            blocked_for_s=tenant.blocked_for_s(snapshot.now_ms),
            lanes=[
                LaneStats(
                    band=band,
                    depth=depth,
                    num_tokens=num_tokens,
                    oldest_age_s=age_s(snapshot.now_ms, oldest_ms),
                    estimated_wait_s=waits[band, tenant.tenant],
                )
                for band, depth, num_tokens, oldest_ms, _ in tenant.lanes
            ],
        )
        for tenant in snapshot.tenants
    ]
    return sorted(tenants, key=lambda tenant: (-tenant.depth, tenant.tenant))


def _estimated_start_s(raw: _RawStatus, model_readiness: Readiness | None) -> float | None:
    if raw.measures is None or model_readiness is None:
        return None
    estimator, now_ms = Estimator(queue_state(raw.measures, model_readiness)), raw.measures.now_ms
    if raw.is_returned:
        return estimator.returned_s(raw.ahead)
    ((band, lane),) = raw.owner.lane_states(now_ms)
    return estimator.lane_s(band, lane, raw.owner.limits_at(now_ms), raw.ahead)
