"""Tables of a simulation's report."""

from __future__ import annotations

from ....shared.process.command_line import format_table
from .figures import (
    ClaimFigures,
    GroupFigures,
    OutageFigures,
    PartitionFigures,
    RecoveryFigures,
    Report,
    SessionFigures,
    SwapFigures,
)


def format_report(report: Report) -> str:
    """Return the report as tables."""
    figures = report.figures
    parts = [_group_table(figures.groups), _claim_table(figures.claims)]
    if figures.partitions:
        parts.append(_partition_table(figures.partitions))
    if figures.sessions:
        warm_turns = f"{figures.num_warm_kept} of {figures.num_warm} turns that an engine was warm for came to it"
        parts.append(f"{_session_table(figures.sessions)}\n{warm_turns}")
    indexes = [one.index for one in figures.jain if one.index is not None]
    if indexes:
        parts.append(
            f"Jain's index of weighted tokens in 10 s, of tenants that waited all the time: "
            f"{min(indexes):.3f} to {max(indexes):.3f}"
        )
    if figures.recoveries:
        parts.append(_recovery_table(figures.recoveries))
    if figures.outages:
        parts.append(_outage_table(figures.outages))
    if figures.swaps:
        parts.append(_swap_table(figures.swaps, figures.duration_s))
    rows = [["holds" if check.holds else "FAILS", check.name, check.seen] for check in figures.checks]
    parts.append(format_table(("check", "", "seen"), rows))
    num_calls = sum(figures.script_calls.values())
    parts.append(
        f"{figures.duration_s:g} s of virtual time in {report.wall_s:.1f} s: {num_calls} scripts, "
        f"{num_calls / max(report.wall_s, 0.01):.0f} in a second"
    )
    return "\n\n".join(parts)


def _group_table(groups: list[GroupFigures]) -> str:
    header = (
        "tenants",
        "number",
        "requests",
        "ended",
        "refused",
        "wait p50",
        "p99",
        "first token p50",
        "p99",
        "end p50",
    )
    rows = [
        [
            group.name,
            str(group.num_tenants),
            str(group.num_requests),
            str(group.num_ended),
            str(group.num_refused),
            *map(_seconds, (group.wait_p50_s, group.wait_p99_s, group.ttft_p50_s, group.ttft_p99_s, group.total_p50_s)),
        ]
        for group in groups
    ]
    return format_table(header, rows)


def _claim_table(claims: ClaimFigures) -> str:
    rows = [[cause, str(number), str(claims.num_wasted.get(cause, 0))] for cause, number in claims.num_claims.items()]
    rows.append(["all", str(sum(claims.num_claims.values())), str(sum(claims.num_wasted.values()))])
    table = format_table(("claims after", "number", "got nothing"), rows)
    return f"{table}\n{claims.claims_per_request:.2f} claims for each request"


def _partition_table(partitions: list[PartitionFigures]) -> str:
    header = ("partition", "tenants", "requests", "ended", "wait p50", "p99")
    rows = [
        [
            one.name,
            str(one.num_tenants),
            str(one.num_requests),
            str(one.num_ended),
            *map(_seconds, (one.wait_p50_s, one.wait_p99_s)),
        ]
        for one in partitions
    ]
    return format_table(header, rows)


def _session_table(sessions: list[SessionFigures]) -> str:
    header = ("sessions of", "later turns", "tokens found", "first token p50", "p99")
    rows = [
        [
            one.name,
            str(one.num_turns),
            "-" if one.found_share is None else f"{100 * one.found_share:.1f} %",
            *map(_seconds, (one.ttft_p50_s, one.ttft_p99_s)),
        ]
        for one in sessions
    ]
    return format_table(header, rows)


def _recovery_table(recoveries: list[RecoveryFigures]) -> str:
    header = ("death at", "engines", "requests", "gone on", "claimed p50", "last", "next token p50", "last")
    rows = [
        [
            f"{one.at_s:g} s",
            str(one.num_engines),
            str(one.num_requests),
            str(one.num_gone_on),
            *map(_seconds, (one.claimed_p50_s, one.claimed_max_s, one.next_token_p50_s, one.next_token_max_s)),
        ]
        for one in recoveries
    ]
    return format_table(header, rows)


def _outage_table(outages: list[OutageFigures]) -> str:
    header = (
        "shard away at",
        "for",
        "came meanwhile",
        "of all",
        "claimed after it p50",
        "last",
        "first token p50",
        "last",
    )
    rows = [
        [
            f"{one.at_s:g} s",
            f"{one.for_s:g} s",
            str(one.num_requests),
            f"{100 * one.share:.1f} %",
            *map(_seconds, (one.claimed_p50_s, one.claimed_max_s, one.first_token_p50_s, one.first_token_max_s)),
        ]
        for one in outages
    ]
    return format_table(header, rows)


def _swap_table(swaps: list[SwapFigures], duration_s: float) -> str:
    header = ("models of an engine", "rule", "swaps/h", "share", "reasons", "longest wait until awake")
    rows = [
        [
            ", ".join(one.models),
            one.rule,
            f"{one.num_swaps * 3600 / duration_s:.0f}",
            f"{100 * one.share:.1f} %",
            ", ".join(f"{number} {reason}" for reason, number in one.num_by_reason.items()),
            ", ".join(
                f"{band} {_seconds(wait_s)}" + ("" if bound_s is None else f" of {_seconds(bound_s)}")
                for band, (wait_s, bound_s) in one.waits.items()
            ),
        ]
        for one in swaps
    ]
    return format_table(header, rows)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s" if value < 1 else f"{value:.1f} s"
