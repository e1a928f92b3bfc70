"""``penstock sim estimates``: errors of estimated waiting times, for each band of some scenarios.

A request is asked about at the moment at which the queue accepts it: its status, the lane of its tenant, and its band.
Only requests of the first half of a run are asked about. The wait of a request that is not claimed before the end of
the run is unknown, so a sample up to the end would consist of the requests that wait less than others.
The error is |estimated - waited| / waited. A wait below ``FLOOR_S`` counts as ``FLOOR_S`` in the divisor, because
20 ms estimated for a wait of 5 ms is not an error of 300 % for anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random

import msgspec

from ....shared.process.command_line import format_table
from ....shared.queue.stats import QueueStats, RequestStatus
from ...statistics import percentile
from ..measures import Note
from ..scenario import Scenario, read_scenarios
from ..simulation import simulate
from ..world import Partition

FLOOR_S = 1.0
# Approximate number of sampled requests of a scenario.
MAX_ASKED = 1500
FOLDER = Path(__file__).parent.parent / "scenarios" / "estimates"
SOURCES = ("request", "tenant", "band")
COUNTS = ("ASKED", "UNCLAIMED", "UNKNOWN")
HEADER = ("SCENARIO", "BAND", *COUNTS, "WAITED p50", "p90", *(f"{name} p50 / p90" for name in SOURCES))


class Estimates(msgspec.Struct, frozen=True):
    """Estimates for a request, in seconds, in the order of ``SOURCES``; None while a queue knows none."""

    request_id: str
    band: str
    estimates: tuple[float | None, float | None, float | None]


class BandErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of the estimates for a band: medians and ninetieth percentiles, in the order of ``SOURCES``.

    ``num_unclaimed`` of the ``num_asked`` requests were not claimed before the end of the run. Their waits are unknown,
    and no figure contains them. ``num_unknown`` of the claimed requests had no estimate.
    """

    band: str
    num_asked: int
    num_unclaimed: int
    num_unknown: int
    waited_p50_s: float
    waited_p90_s: float
    medians: list[float]
    p90s: list[float]


class Sample:
    """Requests of a scenario to ask about: some of those that arrive in the first half of the run, drawn at random."""

    def __init__(self, scenario: Scenario) -> None:
        self._half_s = scenario.duration_s / 2
        num_expected = sum(group.at_start + group.arrivals.most_per_s * self._half_s for group in scenario.tenants)
        self._share = min(1.0, MAX_ASKED / max(1.0, num_expected))
        self._random = Random(f"{scenario.seed} asked")

    def should_ask(self, note: Note) -> bool:
        """Return whether to ask about a request."""
        return note.arrived_s <= self._half_s and self._random.random() < self._share


class Asking:
    """Collector of estimates for a sample of the requests that a simulation accepts."""

    def __init__(self, scenario: Scenario) -> None:
        self.guesses: list[Estimates] = []
        self._sample = Sample(scenario)

    def ask(self, partition: Partition, note: Note) -> None:
        if not self._sample.should_ask(note):
            return
        status = partition.do(partition.queue.status(note.request_id))
        assert status is not None
        self.guesses.append(make_estimates(status, partition.do(partition.queue.stats(tenants=[note.tenant]))))


def make_estimates(status: RequestStatus, stats: QueueStats) -> Estimates:
    """Return the estimates for a request that has just arrived."""
    lanes = [
        lane
        for tenant in stats.tenants
        for lane in tenant.lanes
        if (tenant.tenant, lane.band) == (status.tenant, status.band)
    ]
    lane_s = lanes[0].estimated_wait_s if lanes else None
    band_s = next(band.estimated_wait_s for band in stats.bands if band.band == status.band)
    return Estimates(status.request_id, status.band, (status.estimated_start_s, lane_s, band_s))


def simulate_errors(url: str, scenario: Scenario, namespace: str = "sim") -> list[BandErrors]:
    """Simulate a scenario, and return the errors of each band that requests came to."""
    asking = Asking(scenario)
    simulated = simulate(url, scenario, namespace, asking.ask)
    return band_errors(scenario, asking.guesses, simulated.measures.notes)


def band_errors(scenario: Scenario, guesses: Sequence[Estimates], notes: dict[str, Note]) -> list[BandErrors]:
    """Compare the estimates for requests that were claimed with their waits."""
    waits = {
        guess.request_id: note.claimed_s - note.arrived_s
        for guess in guesses
        if (note := notes.get(guess.request_id)) is not None and note.claimed_s is not None
    }
    return [
        _errors_of(band, len(own), [(guess, waits[guess.request_id]) for guess in own if guess.request_id in waits])
        for band in scenario.queue.bands
        if (own := [guess for guess in guesses if guess.band == band])
    ]


def _errors_of(band: str, num_asked: int, pairs: Sequence[tuple[Estimates, float]]) -> BandErrors:
    complete = [(guess.estimates, waited_s) for guess, waited_s in pairs if None not in guess.estimates]
    errors = [
        [abs((estimates[place] or 0.0) - waited_s) / max(waited_s, FLOOR_S) for estimates, waited_s in complete]
        for place in range(len(SOURCES))
    ]
    waits = [waited_s for _, waited_s in pairs]
    return BandErrors(
        band=band,
        num_asked=num_asked,
        num_unclaimed=num_asked - len(pairs),
        num_unknown=len(pairs) - len(complete),
        waited_p50_s=percentile(waits, 0.5),
        waited_p90_s=percentile(waits, 0.9),
        medians=[percentile(of, 0.5) for of in errors],
        p90s=[percentile(of, 0.9) for of in errors],
    )


def error_rows(name: str, errors: Iterable[BandErrors]) -> list[list[str]]:
    """Return the rows of the table below ``HEADER``."""
    return [
        [
            name,
            one.band,
            str(one.num_asked),
            str(one.num_unclaimed),
            str(one.num_unknown),
            f"{one.waited_p50_s:.1f} s",
            f"{one.waited_p90_s:.1f} s",
            *(f"{median:.2f} / {p90:.2f}" for median, p90 in zip(one.medians, one.p90s, strict=True)),
        ]
        for one in errors
    ]


def print_errors(paths: Sequence[Path], errors_of: Callable[[Scenario], list[BandErrors]], seed: int | None) -> None:
    """Print the errors of scenarios, by default of those that come with the package.

    Args:
        errors_of: runs a scenario.
        seed: replaces the seed of each scenario.

    Raises:
        ConfigurationError: a scenario is wrong, or cannot be read.
    """
    rows: list[list[str]] = []
    for path, scenario in read_scenarios(paths or sorted(FOLDER.glob("*.toml")), seed):
        rows += error_rows(path.stem, errors_of(scenario))
    print(format_table(HEADER, rows))
