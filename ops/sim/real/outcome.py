"""Results of a simulated or real run of a scenario, for the comparison of both."""

from __future__ import annotations

import math
import statistics

import msgspec

from ....shared.process.command_line import format_table
from ..measures import Measures
from ..reports.figures import GroupFigures
from ..reports.report import group_figures
from ..scenario import Scenario

OF_GROUPS = ("num_ended", "wait_p50_s", "wait_p99_s", "ttft_p50_s", "ttft_p99_s", "total_p50_s", "total_p99_s")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run.

    Args:
        tokens_per_s: tokens of finished requests per second, prompt and output.
        claims_per_request: claims per claimed request.
        wasted_share: share of claims that returned nothing.
        jain: mean of Jain's index over windows in which several tenants waited all the time; None without any.
    """

    groups: list[GroupFigures]
    tokens_per_s: float
    claims_per_request: float
    wasted_share: float
    jain: float | None


def outcome_of(scenario: Scenario, measures: Measures) -> Outcome:
    """Return the results of a run."""
    ended = [note for note in measures.notes.values() if note.ended_s is not None]
    num_claimed = sum(note.claimed_s is not None for note in measures.notes.values())
    num_claims = measures.num_claims.total()
    indexes = [index for _, index, _ in measures.jain if not math.isnan(index)]
    return Outcome(
        groups=group_figures(scenario.tenants, measures),
        tokens_per_s=round(sum(note.num_prompt + note.num_output for note in ended) / scenario.duration_s, 1),
        claims_per_request=round(num_claims / max(1, num_claimed), 3),
        wasted_share=round(measures.num_wasted.total() / max(1, num_claims), 3),
        jain=round(statistics.mean(indexes), 4) if indexes else None,
    )


def format_comparison(real: Outcome, simulated: Outcome) -> str:
    """Return a table with a row for each value: real, simulated, and the error of the second."""
    rows = [
        _comparison_row(one.name, name, getattr(one, name), getattr(other, name))
        for one, other in zip(real.groups, simulated.groups, strict=True)
        for name in OF_GROUPS
    ]
    of_all = ("tokens_per_s", "claims_per_request", "wasted_share", "jain")
    rows += [_comparison_row("all", name, getattr(real, name), getattr(simulated, name)) for name in of_all]
    return format_table(("tenants", "figure", "real", "simulated", "off by"), rows)


def _comparison_row(whose: str, name: str, was: float | None, is_: float | None) -> list[str]:
    off = "-" if not was or is_ is None else f"{100 * (is_ - was) / was:+.1f} %"
    return [whose, name, *("-" if value is None else f"{value:g}" for value in (was, is_)), off]
