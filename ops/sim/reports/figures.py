"""The figures of a simulation's report."""

from __future__ import annotations

import msgspec


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one group of tenants. Times in seconds of virtual time; None without values.

    ``wait`` is from arrival to the first claim, ``ttft`` to the first token, ``total`` to the end.
    """

    name: str
    num_tenants: int
    num_requests: int
    num_ended: int
    num_refused: int
    wait_p50_s: float | None
    wait_p99_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    total_p50_s: float | None
    total_p99_s: float | None


class PartitionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one partition of a model; times as in ``GroupFigures``."""

    name: str
    num_tenants: int
    num_requests: int
    num_ended: int
    wait_p50_s: float | None
    wait_p99_s: float | None


class SessionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the answered turns after the first, of one group's sessions.

    Args:
        found_share: share of the tokens of the turn before, prompt and output, that its engine had cached.
    """

    name: str
    num_turns: int
    found_share: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None


class JainFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Jain's index of the ten seconds up to ``at_s``, over tenants that waited throughout; None for fewer than two."""

    at_s: float
    index: float | None
    num_tenants: int


class ClaimFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Claims by cause: "start", "wake", "end" (of a request), "retry", "idle"."""

    num_claims: dict[str, int]
    num_wasted: dict[str, int]
    claims_per_request: float


class RecoveryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a death. ``claimed`` and ``next_token`` are seconds from it, of the requests that ran there."""

    at_s: float
    num_engines: int
    num_requests: int
    num_gone_on: int
    claimed_p50_s: float | None
    claimed_max_s: float | None
    next_token_p50_s: float | None
    next_token_max_s: float | None


class OutageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a shard's outage. ``share`` is its share of all requests that arrived meanwhile.

    Times are from its return to the claim and the first token of its requests.
    """

    models: list[str]
    at_s: float
    for_s: float
    num_requests: int
    share: float
    claimed_p50_s: float | None
    claimed_max_s: float | None
    first_token_p50_s: float | None
    first_token_max_s: float | None


class SwapFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of an engine with several models.

    Args:
        share: share of time in which it swapped.
        num_by_reason: swaps by reason.
        waits: longest time for which a model had waiting requests before it woke, by band, with its bound. The bound is
            None for a rule without one.
    """

    models: list[str]
    rule: str
    num_swaps: int
    share: float
    num_by_reason: dict[str, int]
    waits: dict[str, tuple[float, float | None]]


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet over time; each list has one value per entry of ``at_s``."""

    at_s: list[float]
    num_waiting: list[int]
    num_running: list[int]
    num_engines: list[int]
    num_wanted: list[int]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A condition, whether it holds, and the observed value."""

    name: str
    holds: bool
    seen: str


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures that depend only on scenario and seed.

    Args:
        partitions: figures of models with several partitions.
        sessions: figures of groups with sessions.
        num_warm, num_warm_kept: requests whose session an engine had cached, and those that ran on it.
    """

    duration_s: float
    seed: int
    groups: list[GroupFigures]
    partitions: list[PartitionFigures]
    sessions: list[SessionFigures]
    num_warm: int
    num_warm_kept: int
    jain: list[JainFigure]
    claims: ClaimFigures
    recoveries: list[RecoveryFigures]
    outages: list[OutageFigures]
    swaps: list[SwapFigures]
    checks: list[Check]
    script_calls: dict[str, int]
    series: Series


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The figures, and the real time of the simulation."""

    figures: Figures
    wall_s: float

    @property
    def holds(self) -> bool:
        """Whether every check holds."""
        return all(check.holds for check in self.figures.checks)
