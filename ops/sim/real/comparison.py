"""``penstock sim compare`` and ``replay``: the same scenario simulated and in real time; errors of estimates there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from ....producer import Client
from ....shared.errors import ConfigurationError
from ...local.stack import LocalStack, private_redis
from ..measures import Note
from ..reports.estimates import BandErrors, Estimates, Sample, band_errors, make_estimates
from ..scenario import MODEL, Scenario, read_scenario
from ..simulation import simulate
from .fit import fit_speed, read_recordings
from .outcome import Outcome, format_comparison, outcome_of
from .real_time import check_comparable, run_in_real_time
from .recording import engine_options, read_recording, run_on_engines


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


def real_errors(scenario: Scenario, model: Path) -> list[BandErrors]:
    """Run a scenario on engines with one thread each on this machine, and return the errors of each band.

    Raises:
        ConfigurationError: the scenario has features that real engines lack, or they did not start.
    """
    check_comparable(scenario)
    if len(scenario.engines) > 1:
        raise ConfigurationError("only engines of one kind can be started; leave one table [[engines]]")
    tenants = [msgspec.structs.replace(group, knows_length=True) for group in scenario.tenants]
    scenario = msgspec.structs.replace(scenario, tenants=tenants)
    asking = _Asking(scenario)
    with LocalStack(model, engine_options(scenario.engines[0])) as stack:
        measures, _ = asyncio.run(run_on_engines(stack.url, MODEL, scenario, asking.ask))
    return band_errors(scenario, asking.guesses, measures.notes)


class _Asking:
    """Collector of estimates for a sample of the requests."""

    def __init__(self, scenario: Scenario) -> None:
        self.guesses: list[Estimates] = []
        self._sample = Sample(scenario)

    async def ask(self, client: Client, note: Note) -> None:
        if self._sample.should_ask(note):
            status, stats = await asyncio.gather(client.status(note.request_id), client.queue_stats())
            if status.position is not None:  # else it has already started
                self.guesses.append(make_estimates(status, stats))
