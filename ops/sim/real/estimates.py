"""``penstock sim estimates --real``: errors of estimates with real engines on a real Redis."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from ....producer import Client
from ....shared.errors import ConfigurationError
from ...local.stack import LocalStack
from ..measures import Note
from ..reports.estimates import BandErrors, Estimates, Sample, band_errors, make_estimates
from ..scenario import MODEL, Scenario
from .real_time import check_comparable
from .recording import engine_options, run_on_engines


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
