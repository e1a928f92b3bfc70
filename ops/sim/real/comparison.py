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
    """Run a scenario in real time, with engines that sleep for the duration of a step, and simulated; print both.

    Raises:
        ConfigurationError: the scenario is invalid, or has features that cannot be compared.
    """
    scenario = read_scenario(text)
    with private_redis(append_only=False) as url:
        real = outcome_of(scenario, run_in_real_time(url, scenario))
    _print(scenario, real)


def replay(folder: Path, speed_of: Path) -> None:
    """Simulate the scenario of a recording, and print both results.

    Args:
        folder: folder of the recording.
        speed_of: recording to whose steps the speed of engines is fitted; the same one, or another.

    Raises:
        ConfigurationError: a folder has no recording.
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
