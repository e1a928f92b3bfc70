"""``penstock sim compare`` and ``replay``: the same scenario simulated and in real time."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...local.private_redis import private_redis
from ..scenario import Scenario
from ..scenario_file import read_scenario
from ..simulation import simulate
from .fit import fit_speed, read_recordings
from .outcome import Outcome, format_comparison, outcome_of
from .real_time import run_in_real_time
from .recording import read_recording


def compare(text: str) -> None:
    """Run a scenario in real time, by engines that sleep for as long as a step takes, and simulated; print both.

    Raises:
        ConfigurationError: the scenario is wrong, or has what cannot be compared.
    """
    scenario = read_scenario(text)
    with private_redis(append_only=False) as url:
        real = outcome_of(scenario, run_in_real_time(url, scenario))
    _print(scenario, real)


def replay(folder: Path, speed_of: Path) -> None:
    """Simulate what real engines were recorded at, and print both.

    Args:
        folder: of the recording.
        speed_of: the recording whose engines are simulated, by a fit to their steps; the same one, or another.

    Raises:
        ConfigurationError: one of them is no recording.
    """
    recorded = read_recording(folder)
    fit = fit_speed(read_recordings([speed_of]))
    kinds = [
        msgspec.structs.replace(kind, speed=fit.speed, slowdown=fit.slowdown) for kind in recorded.scenario.engines
    ]
    _print(msgspec.structs.replace(recorded.scenario, engines=kinds), recorded.outcome)


def _print(scenario: Scenario, real: Outcome) -> None:
    with private_redis(append_only=False) as url:
        simulated = outcome_of(scenario, simulate(url, scenario).measures)
    print(format_comparison(real, simulated))
    print(f"\n{scenario.duration_s:g} s, {sum(kind.number for kind in scenario.engines)} engines")
