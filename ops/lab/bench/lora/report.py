"""Table and goals of the cost of adapters."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from ..goals import Goal
from ..result import describe_versions, figure_table
from .row import EIGHT, NUM_ADAPTERS, ONE, OURS, PHASES, LoraRow, LoraSide

MIN_OVER_BASE = {ONE: 0.95, EIGHT: 0.85}
_MAX_WORDS = 300


def lora_table(row: LoraRow) -> Table:
    """Return the table of tokens/s by engine: without adapter support, and with it by the number of adapters used."""
    title = f"{row.model}, {row.dtype}: tokens/s of {row.num_requests} requests at once, and over those without LoRA"
    columns = ("LoRA off", *(f"LoRA on, {phase}" for phase in PHASES))
    table = figure_table(title, "engine", *columns)
    for side in row.sides:
        table.add_row(side.name, _off(side), *(_cell(side, phase) for phase in PHASES))
    versions = "; ".join(describe_versions(side.name, side.versions) for side in row.sides if side.versions)
    wrong = "; ".join(escape(words) for side in row.sides for words in _wrong(side))
    caption = f"{NUM_ADAPTERS} adapters of all linear layers; medians of {row.rounds} rounds"
    table.caption = "; ".join(filter(None, (caption, versions, wrong)))
    return table


def _wrong(side: LoraSide) -> Iterator[str]:
    if side.wrong:
        yield f"{side.name}: {side.wrong[:_MAX_WORDS]}"
    if side.wrong_mixed:
        yield f"{side.name} is wrong where a batch has requests with and without: {side.wrong_mixed[:_MAX_WORDS]}"


def _off(side: LoraSide) -> str:
    if side.missing or side.wrong or not side.off:
        return side.missing or ("wrong" if side.wrong else "-")
    return f"{statistics.median(side.off):,.1f}"


def _cell(side: LoraSide, phase: str) -> str:
    ratio = side.ratio(phase)
    return "-" if ratio is None else f"{statistics.median(side.on[phase]):,.1f}, {ratio:.2f}"


def lora_goals(row: LoraRow) -> Iterator[Goal]:
    """Yield goals of the speed with our adapters, relative to none and to vLLM's."""
    ours = row.side(OURS)
    for phase, at_least in MIN_OVER_BASE.items():
        value = None if ours is None else ours.ratio(phase)
        what = f"tokens/s with adapters, {phase}, over an engine without"
        yield Goal(model=row.model, what=what, value=value, at_least=at_least)
        what = f"tokens/s with adapters, {phase}, alone over vLLM offline"
        yield Goal(model=row.model, what=what, value=row.over_vllm(phase), at_least=1.0)
