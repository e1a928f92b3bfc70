"""``penstock sim compare``: the same scenario in virtual and in real time."""

from __future__ import annotations

from ...shared.command_line import format_table
from ..bench.private_redis import private_redis
from .real_time import run_in_real_time
from .report import GroupFigures, group_figures
from .scenario import Scenario, read_scenario
from .simulation import simulate

COMPARED = ("num_ended", "wait_p50_s", "wait_p99_s", "ttft_p50_s", "ttft_p99_s", "total_p50_s", "total_p99_s")


def compare(text: str) -> None:
    """Run a scenario both ways, and print what each saw.

    Raises:
        ConfigurationError: the scenario is wrong, or has what cannot be compared.
    """
    scenario = read_scenario(text)
    with private_redis(append_only=False) as url:
        real = group_figures(scenario.tenants, run_in_real_time(url, scenario))
    with private_redis(append_only=False) as url:
        virtual = group_figures(scenario.tenants, simulate(url, scenario).measures)
    print(format_comparison(scenario, real, virtual))


def format_comparison(scenario: Scenario, real: list[GroupFigures], virtual: list[GroupFigures]) -> str:
    """A row for each figure of each group: real, simulated, and how far the second is off."""
    rows: list[list[str]] = []
    for one, other in zip(real, virtual, strict=True):
        for name in COMPARED:
            was, is_ = getattr(one, name), getattr(other, name)
            off = "-" if not was or is_ is None else f"{100 * (is_ - was) / was:+.1f} %"
            rows.append([one.name, name, *("-" if value is None else f"{value:g}" for value in (was, is_)), off])
    table = format_table(("tenants", "figure", "real time", "simulated", "off by"), rows)
    return f"{table}\n\n{scenario.duration_s:g} s, {sum(kind.number for kind in scenario.engines)} engines"
