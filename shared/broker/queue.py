"""One model's queue as a whole: looked at, paused, configured, purged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..connection import CommandConnection
from ..errors import ValidationError
from ..keys import ModelKeys
from ..names import check_name
from ..queue.policy import QueuePolicy, TenantPolicy, decode_policy
from ..queue.request_state import RequestState
from ..queue.stats import BandStats, LaneStats, QueueStats, RequestStatus, TenantStats
from ..shown import shown
from .damage import refusing_damage
from .repair import repairing, run_script

# Tenants or requests per script call, so that none holds up the server for long.
PAGE = 500


class _RawStats(msgspec.Struct, array_like=True):
    """As ``stats.lua`` returns it."""

    now_ms: float
    paused_at_ms: float
    num_started: int
    num_returned: int
    rate_ms: float
    rate_requests: float
    rate_tokens: float
    mean_output: float
    default_band: str
    bands: list[tuple[str, int, int, int, float]]
    num_awaiting: int
    num_warm: int
    num_warm_kept: int

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.rate_tokens / self.rate_ms if self.rate_ms else 0.0


class _RawTenant(msgspec.Struct, array_like=True):
    """As ``tenant_stats.lua`` returns it."""

    tenant: str
    num_started: int
    blocked_until_ms: float
    weight: float
    lanes: list[tuple[str, int, int, float]]


class _RawStatus(msgspec.Struct, array_like=True):
    """As ``status.lua`` returns it."""

    state: RequestState
    tenant: str
    band: str
    count: int
    attempts: int
    engine: str
    deadline_ms: float
    ahead: int
    lane_depth: int
    lane_tokens: int
    tokens_above: int
    tokens_in_band: int
    num_tenants: int
    rate_ms: float
    rate_tokens: float
    paused: int


class Queue:
    """All methods raise ``RedisUnavailableError`` when Redis stays away for longer than the connection retries."""

    def __init__(self, connection: CommandConnection, keys: ModelKeys) -> None:
        self._connection = connection
        self._keys = keys

    async def stats(self, *, tenants: bool | Sequence[str] = False) -> QueueStats:
        """Return the state of the queue; with ``tenants`` that of each tenant, or of those, the deepest lanes first."""
        raw = msgspec.msgpack.decode(await self._run("stats"), type=_RawStats)
        names = (await self.tenants() if tenants else []) if isinstance(tenants, bool) else tenants
        found = await self._tenant_stats(raw, names)
        bands = _band_stats(raw)
        default = next(band for band in bands if band.band == raw.default_band)
        return QueueStats(
            model=self._keys.name,
            paused_at=raw.paused_at_ms / 1000 if raw.paused_at_ms else None,
            depth=sum(band.depth for band in bands) + raw.num_returned,
            num_tokens=sum(band.num_tokens for band in bands),
            num_running=raw.num_started - raw.num_returned,
            num_returned=raw.num_returned,
            oldest_age_s=max(band.oldest_age_s for band in bands),
            estimated_wait_s=default.estimated_wait_s,
            requests_per_s=1000 * raw.rate_requests / raw.rate_ms if raw.rate_ms else 0.0,
            tokens_per_s=raw.tokens_per_s,
            mean_output_tokens=raw.mean_output,
            bands=bands,
            tenants=found,
            num_awaiting_input=raw.num_awaiting,
            num_warm=raw.num_warm,
            num_warm_kept=raw.num_warm_kept,
        )

    async def status(self, request_id: str) -> RequestStatus | None:
        """Return where a request stands, or None if it is unknown or its result has expired.

        Raises:
            DamagedRecordError: others than the scripts have written to its record.
        """
        own_keys = [self._keys.request(request_id)]
        reply = await run_script(self._connection, self._keys, "status", own_keys, [request_id])
        if reply is None:
            return None
        with refusing_damage(request_id, "record"):
            raw = msgspec.msgpack.decode(reply, type=_RawStatus)
        return RequestStatus(
            request_id=request_id,
            state=raw.state,
            tenant=raw.tenant,
            band=raw.band,
            position=raw.ahead if raw.ahead >= 0 else None,
            estimated_start_s=_estimated_start_s(raw),
            num_output_tokens=raw.count,
            num_attempts=raw.attempts,
            engine_id=raw.engine,
            deadline=raw.deadline_ms / 1000 if raw.deadline_ms else None,
        )

    async def pause(self, *, put_back: bool, abort: bool = False) -> int:
        """Hand out no request until ``resume``, whatever is restarted; returns how many were running.

        Args:
            put_back: queue what runs again, to go on after its last token; else it runs on to its end.
            abort: end what runs, and what was queued again before, with finish_reason "abort".
        """
        return await self._run("pause", 2 if abort else int(put_back))

    async def resume(self) -> bool:
        """Hand out requests again; False if the queue was not paused."""
        return bool(await self._run("resume"))

    async def is_paused(self) -> bool:
        return msgspec.msgpack.decode(await self._run("stats"), type=_RawStats).paused_at_ms > 0

    async def purge(self, tenant: str, band: str = "") -> int:
        """Cancel what waits of a tenant and never ran, in one band or all; returns how many that was.

        Raises:
            ValidationError: there is no such band, or ``tenant`` is no name.
        """
        check_name("tenant", tenant)
        bands = (await self.policy()).bands
        if band and band not in bands:
            raise ValidationError(f"band must be one of {', '.join(bands)}, got {shown(band)}")
        num_cancelled = 0
        while count := await self._run("purge", tenant, band, PAGE):
            num_cancelled += count
        return num_cancelled

    async def tenants(self) -> list[str]:
        """Return the tenants of which something waits or runs."""
        return sorted(name.decode() for name in await self._read("SMEMBERS", self._keys.active_tenants))

    async def policy(self) -> QueuePolicy:
        """Return the queue's policy; the default one if nobody has configured it."""
        data = await self._read("GET", self._keys.policy)
        return QueuePolicy() if data is None else decode_policy(data, QueuePolicy)

    async def configure(self, policy: QueuePolicy) -> None:
        """Set the queue's policy; it counts from the next enqueue and claim on, for what waits as well.

        Raises:
            ValidationError: requests wait in a band that the policy has not.
        """
        occupied = await self._run("configure", policy.encode(), *policy.bands)
        if occupied:
            names = ", ".join(band.decode() for band in occupied)
            raise ValidationError(f"bands must keep {names} while requests wait there, got {', '.join(policy.bands)}")

    async def tenant_policies(self) -> dict[str, TenantPolicy]:
        """Return the policies of the tenants that have one of their own."""
        flat = await self._read("HGETALL", self._keys.tenant_policies)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return {name.decode(): decode_policy(data, TenantPolicy) for name, data in pairs}

    async def tenant_policy(self, tenant: str) -> TenantPolicy | None:
        """Return a tenant's own policy; None if it has the queue's."""
        data = await self._read("HGET", self._keys.tenant_policies, check_name("tenant", tenant))
        return None if data is None else decode_policy(data, TenantPolicy)

    async def configure_tenant(self, tenant: str, policy: TenantPolicy | None) -> None:
        """Set a tenant's policy; None gives it the queue's default one again."""
        await self._run("configure_tenant", check_name("tenant", tenant), b"" if policy is None else policy.encode())

    async def _tenant_stats(self, raw: _RawStats, names: Sequence[str]) -> list[TenantStats]:
        found: list[TenantStats] = []
        for start in range(0, len(names), PAGE):
            reply = await self._run("tenant_stats", *names[start : start + PAGE])
            decoded = msgspec.msgpack.decode(reply, type=list[_RawTenant])
            found += [_tenant_stats(tenant, raw) for tenant in decoded]
        return sorted(found, key=lambda tenant: (-tenant.depth, tenant.tenant))

    async def _run(self, name: str, *args: Any) -> Any:
        return await run_script(self._connection, self._keys, name, [self._keys.leases], list(args))

    async def _read(self, *command: Any) -> Any:
        return await repairing(self._connection, self._keys, lambda: self._connection.execute(*command))


def _band_stats(raw: _RawStats) -> list[BandStats]:
    bands: list[BandStats] = []
    num_tokens_before = 0
    for name, depth, num_tokens, num_tenants, oldest_ms in raw.bands:
        num_tokens_before += num_tokens
        bands.append(
            BandStats(
                band=name,
                depth=depth,
                num_tokens=num_tokens,
                num_tenants=num_tenants,
                oldest_age_s=_age_s(raw.now_ms, oldest_ms),
                estimated_wait_s=_wait_s(num_tokens_before, raw.tokens_per_s),
            )
        )
    return bands


def _tenant_stats(tenant: _RawTenant, raw: _RawStats) -> TenantStats:
    lanes = [
        LaneStats(
            band=band,
            depth=depth,
            num_tokens=num_tokens,
            oldest_age_s=_age_s(raw.now_ms, oldest_ms),
            estimated_wait_s=_wait_s(_tokens_before(raw, band, num_tokens), raw.tokens_per_s),
        )
        for band, depth, num_tokens, oldest_ms in tenant.lanes
    ]
    blocked_for_s = max(0.0, (tenant.blocked_until_ms - raw.now_ms) / 1000)
    return TenantStats(
        tenant=tenant.tenant,
        weight=tenant.weight,
        num_running=tenant.num_started,
        blocked_for_s=float("inf") if tenant.blocked_until_ms < 0 else blocked_for_s,
        lanes=lanes,
    )


def _tokens_before(raw: _RawStats, band: str, num_tokens: int) -> int:
    """Tokens that are served before the last of a lane: its own, what waits above, and as many of each other tenant."""
    above = 0
    for name, _, in_band, num_tenants, _ in raw.bands:
        if name == band:
            return above + min(in_band, num_tokens * max(1, num_tenants))
        above += in_band
    return num_tokens


def _estimated_start_s(raw: _RawStatus) -> float | None:
    if raw.ahead < 0 or raw.paused:
        return None
    own = raw.lane_tokens * raw.ahead // raw.lane_depth if raw.lane_depth else 0
    before = raw.tokens_above + min(raw.tokens_in_band, own * max(1, raw.num_tenants))
    return _wait_s(before, 1000 * raw.rate_tokens / raw.rate_ms if raw.rate_ms else 0.0)


def _wait_s(num_tokens: int, tokens_per_s: float) -> float | None:
    return num_tokens / tokens_per_s if tokens_per_s else None


def _age_s(now_ms: float, then_ms: float) -> float:
    return max(0.0, (now_ms - then_ms) / 1000) if then_ms else 0.0
