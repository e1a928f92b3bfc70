"""The figures of a simulation, as its report holds them."""

from __future__ import annotations

import msgspec


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One group of tenants. Times in seconds of virtual time; None where nothing was seen.

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
    """One partition of a model; times as in ``GroupFigures``."""

    name: str
    num_tenants: int
    num_requests: int
    num_ended: int
    wait_p50_s: float | None
    wait_p99_s: float | None


class SessionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Turns behind the first of one group's sessions, those that have an answer.

    Args:
        found_share: of the tokens that were computed in the turn before, prompt and answer, those that its engine had.
    """

    name: str
    num_turns: int
    found_share: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None


class JainFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Of the ten seconds up to ``at_s``, over the tenants that waited all that time; None for fewer than two."""

    at_s: float
    index: float | None
    num_tenants: int


class ClaimFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Claims by cause: "start", "wake", "end" (of a request), "retry", "idle"."""

    num_claims: dict[str, int]
    num_wasted: dict[str, int]
    claims_per_request: float


class RecoveryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A death. ``claimed`` and ``next_token`` are seconds from it, of the requests that were under way there."""

    at_s: float
    num_engines: int
    num_requests: int
    num_gone_on: int
    claimed_p50_s: float | None
    claimed_max_s: float | None
    next_token_p50_s: float | None
    next_token_max_s: float | None


class OutageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A shard was away. Its share is of all requests that came meanwhile; times are from its return to their claim and
    first token."""

    models: list[str]
    at_s: float
    for_s: float
    num_requests: int
    share: float
    claimed_p50_s: float | None
    claimed_max_s: float | None
    first_token_p50_s: float | None
    first_token_max_s: float | None


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet over time; each list has one value per entry of ``at_s``."""

    at_s: list[float]
    num_waiting: list[int]
    num_running: list[int]
    num_engines: list[int]
    num_wanted: list[int]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What must hold, whether it does, and what was seen."""

    name: str
    holds: bool
    seen: str


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from scenario and seed alone.

    Args:
        partitions: of models that have several.
        sessions: of groups that have some.
        num_warm, num_warm_kept: requests that had an engine with their session, and those that it got.
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
    checks: list[Check]
    script_calls: dict[str, int]
    series: Series


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The figures, and the real time that they took."""

    figures: Figures
    wall_s: float

    @property
    def holds(self) -> bool:
        """Whether every check does."""
        return all(check.holds for check in self.figures.checks)
