"""Comparison of rules by which models share an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ....shared.errors import ConfigurationError
from ....shared.process.command_line import format_table
from ....shared.values.shown import shown
from ...statistics import percentile
from ..measures import Note
from ..scenario import Scenario, SwapRule, Tenants, read_scenarios
from ..simulation import Simulated

FOLDER = Path(__file__).parent.parent / "scenarios" / "swap"
FIXED_COLUMNS = ("rule", "swaps/h", "share", "tokens/s", "read again/s")


def print_rules(
    paths: Sequence[Path],
    rules: Sequence[str] | None,
    run: Callable[[Scenario], Simulated],
    seed: int | None,
) -> None:
    """Print a table per scenario with a row per rule, by default of the scenarios that come with the package.

    Args:
        run: runs a scenario.
        seed: replaces the seed of each scenario.

    Raises:
        ConfigurationError: a rule is unknown, or a scenario is wrong or cannot be read.
    """
    chosen = [_rule(name) for name in rules] if rules else list(SwapRule)
    for path, scenario in read_scenarios(paths or sorted(FOLDER.glob("*.toml")), seed):
        if not any(kind.models for kind in scenario.engines):
            raise ConfigurationError(f"{path} has no [[engines]] with models, so no rule applies; add models")
        rows = [make_row(run(with_rule(scenario, rule)), rule) for rule in chosen]
        print(f"{path.stem}\n{format_table(make_header(scenario), rows)}\n", flush=True)


def with_rule(scenario: Scenario, rule: SwapRule) -> Scenario:
    """Return a scenario whose engines swap by another rule."""
    engines = [
        msgspec.structs.replace(kind, swaps=msgspec.structs.replace(kind.swaps, rule=rule)) for kind in scenario.engines
    ]
    return msgspec.structs.replace(scenario, engines=engines)


def make_header(scenario: Scenario) -> list[str]:
    """Return the header of the table of a scenario."""
    groups = [f"{group.name}: first token p50 / p99 / max, served" for group in scenario.tenants]
    return [*FIXED_COLUMNS, *groups]


def make_row(simulated: Simulated, rule: SwapRule) -> list[str]:
    """Return the figures of one rule. Requests without a first token count as if it had come at the end."""
    duration_s, notes = simulated.scenario.duration_s, simulated.measures.notes
    logs = simulated.swap_logs
    # Of a request that has not ended, the simulation knows no more than that it began.
    num_tokens = sum(note.num_output for note in notes.values() if note.ended_s is not None)
    return [
        rule,
        f"{sum(len(one.swaps) for one in logs) * 3600 / duration_s:.0f}",
        f"{100 * sum(one.swap_s for one in logs) / duration_s / len(logs):.1f} %",
        f"{num_tokens / duration_s:.0f}",
        f"{simulated.measures.num_recomputed / duration_s:.0f}",
        *(_group_cell(group, list(notes.values()), duration_s) for group in simulated.scenario.tenants),
    ]


def _group_cell(group: Tenants, notes: Sequence[Note], duration_s: float) -> str:
    own = [note for note in notes if note.group.name == group.name]
    waits = [(duration_s if note.first_token_s is None else note.first_token_s) - note.arrived_s for note in own]
    served = sum(note.ended_s is not None for note in own) / max(1, len(own))
    p50, p99, longest = (percentile(waits, share) for share in (0.5, 0.99, 1.0))
    return f"{p50:.1f} / {p99:.1f} / {longest:.1f} s, {100 * served:.0f} %"


def _rule(name: str) -> SwapRule:
    if name not in tuple(SwapRule):
        raise ConfigurationError(f"rule must be one of {', '.join(SwapRule)}, got {shown(name)}")
    return SwapRule(name)
