"""Policies of a model's queue: order and limits of its requests. JSON in Redis; the scripts read fields by name.

A field that an older version did not write has its default; ``None`` means no limit.
"""

from __future__ import annotations

import enum
import math
import re
from typing import Any, TypeVar

import msgspec

from ..errors import ConfigurationError, ValidationError
from ..values.arguments import CheckedNames
from ..values.shown import shown

MAX_BANDS = 8
MAX_QUEUE_DEPTH = 100_000
MAX_AFFINITY_MS = 60_000
EVENTS_KEPT = 20_000
MAX_EVENTS_KEPT = 10_000_000
P = TypeVar("P", "QueuePolicy", "TenantPolicy")
_BAND_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


class OverQuota(enum.StrEnum):
    """Treatment of a request of a tenant that is over a quota."""

    WAIT = "wait"
    REFUSE = "refuse"


class Order(enum.StrEnum):
    """The order inside a lane: first come, first served, or earliest deadline first."""

    FCFS = "fcfs"
    EDF = "edf"


class TenantPolicy(msgspec.Struct, metaclass=CheckedNames, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Share and limits of a tenant.

    Args:
        weight: its share of the tokens relative to other waiting tenants of a band, positive.
        requests_per_minute: max requests that start within any minute.
        tokens_per_minute: max tokens, prompt and output, within any minute; the last request may exceed it.
        max_concurrent_requests: max requests that have started and not ended.
        over_quota: whether requests beyond these three wait, or are refused with ``QuotaExceededError``.
        max_queue_depth: max waiting requests; more are refused with ``QueueFullError``.
        max_queue_tokens: max waiting tokens, prompt and ``max_tokens``.

    Raises:
        ValidationError: a value is out of range; the message names the field.
    """

    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    over_quota: OverQuota = OverQuota.WAIT
    max_queue_depth: int | None = None
    max_queue_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_number("weight", self.weight, 0.001, 1_000_000)
        for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests"):
            _check_limit(name, getattr(self, name))
        _check_depths(self)
        if self.over_quota not in tuple(OverQuota):
            raise ValidationError(f"over_quota must be 'wait' or 'refuse', got {shown(self.over_quota)}")

    def encode(self) -> bytes:
        """Return the policy as JSON with all fields."""
        return msgspec.json.encode(self)


class RateLimit(msgspec.Struct, frozen=True):
    """A quota per minute: ``most``, and how many of it remain."""

    most: int
    remaining: int


class RateLimits(msgspec.Struct, frozen=True):
    """Quotas per minute of a tenant; None without one. ``reset_ms`` is the time until nothing counts any more."""

    requests: RateLimit | None
    tokens: RateLimit | None
    reset_ms: int


class QueuePolicy(msgspec.Struct, metaclass=CheckedNames, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Order, limits and retention of a model's requests.

    Args:
        bands: names of the priority bands, the most urgent first.
        default_band: band of requests that name none.
        ageing_s: a request that has waited for this long counts as one of the next higher band, after twice as long of
            the one above that, and so on. None: it never does, and a low band may starve.
        strictness: share of its tokens that a band retains while requests below it have aged, in (0, 1]; the rest goes
            to the lower bands. With 1, bands are strict, and a low band may starve.
        order: inside a lane, "fcfs" or "edf".
        max_queue_depth: max waiting requests; more are refused with ``QueueFullError``.
        max_queue_tokens: max waiting tokens, prompt and ``max_tokens``.
        tenant: policy of every tenant that has none of its own.
        warm_ttl_s: how long the engine of a conversation is remembered, positive. None: not at all, and
            conversations go to any engine.
        affinity_ms: how long other engines leave a request to the one that has its conversation in its cache, while
            that has capacity, in [0, 60000]. With 0 that engine is woken for it, but no other one waits.
        events_kept: about how many events of requests the model retains, in [0, 10000000]; with 0 none are written, and
            only the state of a request is known.

    Raises:
        ValidationError: a value is out of range; the message names the field.
    """

    bands: tuple[str, ...] = ("interactive", "standard", "batch")
    default_band: str = "standard"
    ageing_s: float | None = 30.0
    strictness: float = 0.9
    order: Order = Order.FCFS
    max_queue_depth: int | None = MAX_QUEUE_DEPTH
    max_queue_tokens: int | None = None
    tenant: TenantPolicy = msgspec.field(default_factory=TenantPolicy)
    warm_ttl_s: float | None = 600.0
    affinity_ms: int = 100
    events_kept: int = EVENTS_KEPT

    def __post_init__(self) -> None:
        if not 1 <= len(self.bands) <= MAX_BANDS or len(set(self.bands)) != len(self.bands):
            raise ValidationError(f"bands must be 1 to {MAX_BANDS} different names, got {list(self.bands)}")
        for band in self.bands:
            if not isinstance(band, str) or not _BAND_NAME.fullmatch(band):
                raise ValidationError(
                    f"bands must be names of a-z, 0-9, '_' and '-', at most 32 characters long, got {shown(band)}"
                )
        if self.default_band not in self.bands:
            raise ValidationError(
                f"default_band must be one of {', '.join(self.bands)}, got {shown(self.default_band)}"
            )
        if self.ageing_s is not None:
            _check_number("ageing_s", self.ageing_s, 0.0, 1e9)
        _check_number("strictness", self.strictness, 0.01, 1.0)
        if self.order not in tuple(Order):
            raise ValidationError(f"order must be 'fcfs' or 'edf', got {shown(self.order)}")
        _check_depths(self)
        if self.warm_ttl_s is not None:
            _check_number("warm_ttl_s", self.warm_ttl_s, 0.001, 1e9)
        _check_number("affinity_ms", self.affinity_ms, 0, MAX_AFFINITY_MS)
        if isinstance(self.events_kept, bool) or not isinstance(self.events_kept, int):
            raise ValidationError(f"events_kept must be an integer, got {shown(self.events_kept)}")
        _check_number("events_kept", self.events_kept, 0, MAX_EVENTS_KEPT)

    def encode(self) -> bytes:
        """Return the policy as JSON with all fields."""
        return msgspec.json.encode(self)


def decode_policy(data: bytes, kind: type[P]) -> P:
    """Return the policy of ``encode``.

    Raises:
        ConfigurationError: a field is unknown or of the wrong type, as a newer version may write it, or it is no JSON.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"the policy in Redis cannot be read: {error}") from error


def _check_depths(policy: TenantPolicy | QueuePolicy) -> None:
    _check_limit("max_queue_depth", policy.max_queue_depth)
    _check_limit("max_queue_tokens", policy.max_queue_tokens)


def _check_limit(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**53):
        raise ValidationError(f"{name} must be a positive integer, or None for no limit, got {shown(value)}")


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    valid = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not valid or not low <= value <= high:
        raise ValidationError(f"{name} must be a number in [{low:g}, {high:g}], got {shown(value)}")
