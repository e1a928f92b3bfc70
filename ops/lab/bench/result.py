"""Results of a run of the workload on one side, the figures computed from them, and tables of figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby

import msgspec
from rich.table import Table

from ...statistics import percentile
from .workload import ALL_AT_ONCE, IDLE, ONE_AT_A_TIME


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Ours over theirs in each round; the median of the rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


class PhaseResult(msgspec.Struct, kw_only=True):
    """Tokens of each request of a phase and their times, in seconds after its start.

    ``sent_s`` is the time when a request reached the engine: at its arrival, or when concurrency permitted it.
    ``num_accepted_tokens`` is the number of accepted draft tokens, ``cpu_s`` the CPU time; 0 if not reported.
    """

    name: str
    wall_s: float
    output_token_ids: list[list[int]]
    token_times_s: list[list[float]]
    sent_s: list[float]
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    cpu_s: float = 0.0

    @classmethod
    def joined(cls, name: str, parts: Sequence[PhaseResult]) -> PhaseResult:
        """Parts that ran one after the other, as one phase that waited for nothing between them."""
        starts = [0.0, *accumulate(part.wall_s for part in parts)]
        return cls(
            name=name,
            wall_s=starts[-1],
            output_token_ids=[ids for part in parts for ids in part.output_token_ids],
            token_times_s=[
                [start + time_s for time_s in times]
                for start, part in zip(starts, parts, strict=False)
                for times in part.token_times_s
            ],
            sent_s=[start + sent_s for start, part in zip(starts, parts, strict=False) for sent_s in part.sent_s],
            num_draft_tokens=sum(part.num_draft_tokens for part in parts),
            num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
            cpu_s=math.fsum(part.cpu_s for part in parts),
        )

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.output_token_ids)) / self.wall_s

    @property
    def ttft_ms(self) -> list[float]:
        """Return the time to first token of each request."""
        pairs = zip(self.token_times_s, self.sent_s, strict=True)
        return [1000 * (times[0] - sent) for times, sent in pairs if times]

    @property
    def itl_ms(self) -> list[float]:
        """Return all times between tokens. Tokens that arrive together share the time since the last ones."""
        return [gap for times in self.token_times_s for gap in _gaps_ms(times)]

    @property
    def ms_per_token(self) -> float:
        """Return the median over requests of the time from the first token to the last, per token after the first."""
        pairs = [1000 * (times[-1] - times[0]) / (len(times) - 1) for times in self.token_times_s if len(times) > 1]
        return statistics.median(pairs)


class SideRun(msgspec.Struct, kw_only=True):
    """A run of a side: ``ready_s`` from the start of its process, memory of all its processes at the end."""

    ready_s: float
    rss_bytes: int
    peak_rss_bytes: int
    phases: list[PhaseResult]
    versions: dict[str, str] = {}

    def phase(self, name: str) -> PhaseResult:
        return next(phase for phase in self.phases if phase.name == name)


class Figures(msgspec.Struct, kw_only=True):
    """Reported figures of one round of one side."""

    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    single_ms_per_token: float
    single_ttft_ms: float
    idle_ttft_ms: float
    ready_s: float
    rss_bytes: int
    peak_rss_bytes: int

    @classmethod
    def from_run(cls, run: SideRun) -> Figures:
        """Reduce a run of ``timed_phases``."""
        everything, single = run.phase(ALL_AT_ONCE), run.phase(ONE_AT_A_TIME)
        return cls(
            tokens_per_s=everything.tokens_per_s,
            ttft_p50_ms=percentile(everything.ttft_ms, 0.5),
            ttft_p99_ms=percentile(everything.ttft_ms, 0.99),
            itl_p50_ms=percentile(everything.itl_ms, 0.5),
            itl_p99_ms=percentile(everything.itl_ms, 0.99),
            single_ms_per_token=single.ms_per_token,
            single_ttft_ms=percentile(single.ttft_ms, 0.5),
            idle_ttft_ms=percentile(run.phase(IDLE).ttft_ms, 0.5),
            ready_s=run.ready_s,
            rss_bytes=run.rss_bytes,
            peak_rss_bytes=run.peak_rss_bytes,
        )


def _gaps_ms(times_s: list[float]) -> list[float]:
    gaps: list[float] = []
    before: float | None = None
    for time_s, group in groupby(times_s):
        count = len(list(group))
        if before is None:
            gaps += [0.0] * (count - 1)
        else:
            gaps += [1000 * (time_s - before) / count] * count
        before = time_s
    return gaps


def figure_table(title: str, first: str, *columns: str) -> Table:
    """Return an empty table whose first column has names."""
    table = Table(title=title)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def add_caption(table: Table, words: str) -> None:
    """Append ``words`` to the caption of a table."""
    table.caption = f"{table.caption}; {words}" if table.caption else words


def describe_versions(name: str, versions: Mapping[str, str]) -> str:
    """Return the versions of ``name`` for a caption."""
    return f"{name}: " + ", ".join(f"{library} {version}" for library, version in versions.items())
