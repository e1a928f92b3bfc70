"""``penstock sim run`` and ``estimates``: simulation of scenarios on a private Redis, with reports."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..local.stack import private_redis
from .reports.estimates import BandErrors, simulate_errors
from .reports.plots import draw
from .reports.report import make_report
from .reports.tables import format_report
from .scenario import Scenario, read_scenario
from .simulation import Simulated, simulate


def simulated_errors(scenario: Scenario) -> list[BandErrors]:
    """Simulate a scenario on a private Redis, and return the errors of estimated waits of each band."""
    with private_redis(append_only=False) as url:
        return simulate_errors(url, scenario)


def simulate_alone(scenario: Scenario) -> Simulated:
    """Simulate a scenario on a private Redis."""
    with private_redis(append_only=False) as url:
        return simulate(url, scenario)


def run_scenario(text: str, *, seed: int | None = None, folder: Path | None = None) -> bool:
    """Simulate, print tables, and write ``report.json`` and plots into ``folder``. Return whether all checks hold.

    Raises:
        ConfigurationError: the scenario is wrong.
    """
    scenario = read_scenario(text)
    if seed is not None:
        scenario = msgspec.structs.replace(scenario, seed=seed)
    report = make_report(simulate_alone(scenario))
    print(format_report(report))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "report.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
        print("\nwritten: " + ", ".join(map(str, (path, *draw(report.figures, folder)))))
    return report.holds
