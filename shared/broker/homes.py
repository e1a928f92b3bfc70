"""Homes of a model: devices that may wake it. They read its demand, and ask for the right to wake it.

A device has several models, which may lie on different shards, so no script sees two of them: the device decides
(``shared/swap/rule.py``), and the keys of each model only inform and grant.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from ..connection import CommandConnection
from ..errors import PenstockError
from ..keys import ModelKeys
from ..queue.stats import ModelState, Readiness
from ..swap.views import SleepLevel, SwapOptions
from .broker import LEASE_TTL_MS
from .script import run_script

# Requests that wait for longer than this, and than their patience, need more engines than serve them.
MORE_ENGINES_AFTER_S = 10.0


class RawHome(msgspec.Struct, array_like=True, frozen=True):
    """A home as the scripts return it; ``ready_ms`` is below 0 if unknown."""

    device: str
    level: int
    wake_ms: float
    ready_ms: float = -1
    num_seqs: int = 0
    error: str = ""


class RawReadiness(msgspec.Struct, array_like=True, frozen=True):
    """Homes, devices with a grant, and the number of engines with a lease, as the scripts return them."""

    homes: list[RawHome]
    grants: list[str]
    num_leases: int


class _RawDemand(msgspec.Struct, array_like=True):
    """The reply of ``demand.lua``."""

    now_ms: float
    is_paused: int
    num_tokens: int
    num_returned: int
    num_running: int
    deadline_ms: float
    bands: list[tuple[str, int, float]]
    engines: tuple[int, int, int]
    grants: list[str]
    homes: list[RawHome]


class Home(msgspec.Struct, frozen=True, kw_only=True):
    """A device that may wake a model.

    Args:
        level: the model's level there.
        wake_s: time that waking it takes.
        ready_in_s: expected time until it is awake there, other models included; None if unknown.
        num_seqs: requests that its engine runs at the same time; 0 if unknown.
        error: code and message if the device has given the model up; else empty.
    """

    device: str
    level: SleepLevel
    wake_s: float
    ready_in_s: float | None = None
    num_seqs: int = 0
    error: str = ""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that need a model, and engines and devices that serve it. Times are seconds from the reading.

    Args:
        is_paused: whether no engine may claim.
        num_waiting: by band, requests that wait in lanes, if an engine could claim one of them.
        num_tokens: prompt and maximum output tokens of all that wait in lanes.
        num_returned: requests that wait after a claim.
        num_running: requests that engines run.
        deadline_in_s: time until the earliest deadline of a waiting request; infinity without one.
        oldest_age_s: by band, age of the oldest request that an engine could claim. A request that was claimed before
            counts from its last claim.
        num_engines: engines that claim.
        num_free_seqs: requests that they could take in addition.
        grants: devices that wake the model now.
        homes: devices that may wake it, or serve it.
    """

    is_paused: bool = False
    num_waiting: dict[str, int] = {}
    num_tokens: int = 0
    num_returned: int = 0
    num_running: int = 0
    deadline_in_s: float = math.inf
    oldest_age_s: dict[str, float] = {}
    num_engines: int = 0
    num_free_seqs: int = 0
    grants: tuple[str, ...] = ()
    homes: tuple[Home, ...] = ()

    def num_engines_wanted(self, options: SwapOptions) -> int:
        """Return how many engines should be awake: 1, or more if the oldest request waits long for full engines.

        Its age is about the time in which the engines serve the queue, and as many more would serve it sooner.
        """
        if self.num_free_seqs:
            return max(1, self.num_engines)
        longest = max(
            (age_s / max(MORE_ENGINES_AFTER_S, options.patience_of(band)) for band, age_s in self.oldest_age_s.items()),
            default=0.0,
        )
        return max(1, math.ceil(self.num_engines * max(1.0, longest)))

    def num_engines_without(self, device: str) -> int:
        """Return the engines that are awake, or that devices other than this one wake, as ``grant.lua`` counts them."""
        num_awake = sum(home.level is SleepLevel.AWAKE for home in self.homes)
        return max(self.num_engines, num_awake) + sum(other != device for other in self.grants)


def homes_of(raw: Sequence[RawHome]) -> tuple[Home, ...]:
    """Return homes from the reply of a script."""
    return tuple(
        Home(
            device=home.device,
            level=SleepLevel(home.level),
            wake_s=home.wake_ms / 1000,
            ready_in_s=home.ready_ms / 1000 if home.ready_ms >= 0 else None,
            num_seqs=home.num_seqs,
            error=home.error,
        )
        for home in raw
    )


def readiness(raw: RawReadiness, num_engines: int) -> Readiness:
    """Return when a model can be served.

    Args:
        num_engines: engines that claim.
    """
    if num_engines:
        return Readiness(state=ModelState.LOADED, in_s=0.0)
    every = homes_of(raw.homes)
    homes = [home for home in every if not home.error]
    if every and not homes and not raw.num_leases:
        _, _, message = every[0].error.partition(" ")
        return Readiness(state=ModelState.BROKEN, error=message)
    # An engine with a lease that does not claim sleeps or drains.
    sleeps = raw.num_leases > 0 or any(home.level < SleepLevel.DISK for home in homes)
    state = ModelState.LOADING if raw.grants else ModelState.ASLEEP if sleeps else ModelState.UNLOADED
    times = [(_ready_in_s(home, home.device in raw.grants), home.num_seqs) for home in homes]
    in_s, num_seqs = min(times, default=(None, 0))
    return Readiness(state=state, in_s=in_s, num_seqs=num_seqs)


def _ready_in_s(home: Home, is_waking: bool) -> float:
    """Return when a home could serve. Its forecast may be older than the request, so it is checked against wake_s."""
    if home.ready_in_s is None:
        return home.wake_s
    return home.ready_in_s if is_waking else max(home.ready_in_s, home.wake_s)


class GrantReply(enum.StrEnum):
    """Answer to a device that asks to wake a model."""

    GRANTED = "granted"
    # Enough engines are awake or waking.
    ELSEWHERE = "elsewhere"
    # Another home goes first; ask again after ``Grant.wait_s``.
    LATER = "later"


class Grant(msgspec.Struct, frozen=True):
    """Answer to a device, and the time after which to ask again."""

    reply: GrantReply
    wait_s: float = 0.0

    @property
    def is_granted(self) -> bool:
        return self.reply is GrantReply.GRANTED


class Homes:
    """The homes of one model, or of one of its partitions.

    All methods raise ``RedisUnavailableError`` when Redis is unavailable for longer than the connection retries.
    """

    def __init__(self, connection: CommandConnection, keys: ModelKeys) -> None:
        self._connection = connection
        self.keys = keys

    async def renew(
        self,
        device: str,
        level: SleepLevel,
        wake_s: float,
        *,
        ready_in_s: float | None = None,
        num_seqs: int = 0,
        error: PenstockError | None = None,
        lease_ttl_ms: int = LEASE_TTL_MS,
    ) -> None:
        """Enter a device, or renew its lease. Call it three times per lease, and at each change of the level.

        Args:
            ready_in_s: expected time until the model is awake there (``shared/swap/forecast.py``); None if unknown.
            num_seqs: requests that its engine runs at the same time; 0 if unknown.
            error: why the device has given the model up. If no engine and no other home is left, requests for it end
                with this error, and new ones are refused with it.
        """
        times = [round(1000 * wake_s), -1 if ready_in_s is None else round(1000 * ready_in_s)]
        failure = "" if error is None else f"{error.code} {error}"
        await self._enter(device, lease_ttl_ms, int(level), *times, num_seqs, failure)

    async def leave(self, device: str) -> None:
        """Remove a device. Requests that must not wait end, if no other home and no engine is left."""
        await self._enter(device, 0, 0, 0, -1, 0, "")

    async def demand(self) -> Demand:
        """Read how much the model is needed."""
        raw = msgspec.msgpack.decode(await self._run("demand"), type=_RawDemand)
        num_engines, num_seqs, num_held = raw.engines
        return Demand(
            is_paused=bool(raw.is_paused),
            num_waiting={band: depth for band, depth, _ in raw.bands},
            num_tokens=raw.num_tokens,
            num_returned=raw.num_returned,
            num_running=raw.num_running,
            deadline_in_s=(raw.deadline_ms - raw.now_ms) / 1000 if raw.deadline_ms else math.inf,
            oldest_age_s={band: max(0.0, raw.now_ms - at_ms) / 1000 for band, _, at_ms in raw.bands},
            num_engines=num_engines,
            num_free_seqs=max(0, num_seqs - num_held),
            grants=tuple(raw.grants),
            homes=homes_of(raw.homes),
        )

    async def request_grant(
        self,
        device: str,
        wake_s: float,
        *,
        waited_s: float = 0.0,
        patience_s: float = 1.0,
        num_engines: int = 1,
        lease_ttl_ms: int = LEASE_TTL_MS,
    ) -> Grant:
        """Ask to wake the model on a device, or renew a grant while it wakes. The first ``renew`` as awake ends it.

        Args:
            waited_s: how long the model has needed an engine more.
            patience_s: how long it waits for a home that wakes the model faster, in addition to the difference.
            num_engines: engines that should be awake.
        """
        args = [device, lease_ttl_ms, round(1000 * wake_s), num_engines, round(1000 * (patience_s - waited_s))]
        reply, wait_ms = await self._run("grant", *args)
        return Grant(GrantReply(reply.decode()), wait_ms / 1000)

    async def return_grant(self, device: str) -> None:
        """Give a grant back: the model could not be woken, so another home may try."""
        await self._run("grant", device, 0, 0, 0, 0)

    async def _enter(self, *args: str | int) -> None:
        await self._run("home", *args)

    async def _run(self, name: str, *args: str | int) -> Any:
        return await run_script(self._connection, self.keys, name, [self.keys.leases], list(args))
