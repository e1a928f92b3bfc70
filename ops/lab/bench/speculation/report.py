"""Table and goals of the gain of speculation."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from ..goals import Goal
from ..result import describe_versions, figure_table
from .row import MANY, PHASES, PairRow, SpeculationRow
from .texts import COPY, JSON, PROSE

MIN_OVER_OFF = {COPY: 2.0, JSON: 1.3, PROSE: 0.98, MANY: 0.98}
_MAX_WORDS = 300


def speculation_table(row: SpeculationRow) -> Table:
    """Return the table of tokens/s by engine, without and with drafts, and acceptance rates where reported."""
    title = f"{row.model}, bfloat16: guessed tokens, tokens/s without → with; in brackets the guesses that were right"
    table = figure_table(title, "engine", *(f"{phase}, {row.num_tokens[phase]:,} tokens" for phase in PHASES))
    for pair in row.pairs:
        table.add_row(pair.name, *(_cell(pair, phase) for phase in PHASES))
    versions = "; ".join(describe_versions(pair.name, pair.versions) for pair in row.pairs if pair.versions)
    wrong = "; ".join(escape(pair.wrong[:_MAX_WORDS]) for pair in row.pairs if pair.wrong)
    table.caption = "; ".join(filter(None, (f"medians of {row.rounds} rounds; every token checked", versions, wrong)))
    return table


def _cell(pair: PairRow, phase: str) -> str:
    ratio = pair.ratio(phase)
    if ratio is None:
        return "wrong" if pair.wrong else pair.missing or "-"
    off, on = (statistics.median(side[phase]) for side in (pair.off, pair.on))
    num_guessed = pair.num_guessed[phase]
    right = f" ({pair.num_right[phase] / num_guessed:.0%} of {num_guessed:,})" if num_guessed else ""
    cpu_ratio = pair.cpu_ratio(phase)
    of_cpu = "" if cpu_ratio is None else f", by CPU time {cpu_ratio:.2f}"
    return f"{off:,.1f} → {on:,.1f}, {ratio:.2f}{of_cpu}{right}"


def speculation_goals(row: SpeculationRow) -> Iterator[Goal]:
    """Yield goals of our gain, and of no loss where nothing can be gained."""
    for pair in row.pairs:
        if pair.name.startswith("Penstock"):
            for phase in PHASES:
                what = f"tokens/s, {phase}, {pair.name} over off"
                yield Goal(model=row.model, what=what, value=pair.ratio(phase), at_least=MIN_OVER_OFF[phase])
