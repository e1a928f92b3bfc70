"""Ledger and budgets at the edges of hours, days and months, on a Redis whose clock the test sets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from penstock.shared.broker.ledger import DAY_S, HOUR_S, Ledger
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import ModelCard
from penstock.shared.queue.budgets import Period

from ...moved_clock import MovedClock
from .test_budgets import Deployment

# Last days of periods: of a day, of months of each length, of February in leap and other years, of a year.
LAST_DAYS = ("2027-02-10", "2027-02-28", "2028-02-28", "2028-02-29", "2030-04-30", "2030-12-31", "2100-02-28")
# Between the moments of a test and midnight, so that a slow machine does not pass it.
MARGIN = timedelta(minutes=20)


class MidnightDeployment(Deployment):
    """A deployment on a server whose clock is set."""

    def __init__(self, commands: CommandConnection, namespace: str, clock: MovedClock) -> None:
        super().__init__(commands, namespace)
        self._clock = clock

    async def now(self) -> datetime:
        return datetime.fromtimestamp(int((await self.commands.execute("TIME"))[0]), UTC)

    async def set_clock(self, moment: datetime) -> None:
        self._clock.move((moment - await self.now()).total_seconds())

    async def retry_after(self) -> tuple[timedelta, datetime] | None:
        """Return the time of a refusal, and the moment it was asked for; None if the budget is not used up."""
        now, refusal = await self.now(), await self.refusal()
        return refusal and (timedelta(seconds=refusal.retry_after_s), now)


@pytest.fixture
async def deployment(commands: CommandConnection, namespace: str, clock: MovedClock) -> MidnightDeployment:
    return MidnightDeployment(commands, namespace, clock)


async def test_budgets_are_renewed_at_the_end_of_their_period(deployment: MidnightDeployment) -> None:
    """Nobody compares the budgets between the moments: an end in the new period counts there alone."""
    for number, (day, period) in enumerate((day, period) for day in LAST_DAYS for period in (Period.DAY, Period.MONTH)):
        midnight = datetime.fromisoformat(day).replace(tzinfo=UTC) + timedelta(days=1)
        await deployment.commands.execute("FLUSHALL")
        await deployment.commands.execute(
            "HSET", deployment.keys.models(), "m", msgspec.json.encode(ModelCard(model="m"))
        )
        await deployment.set_clock(midnight - MARGIN)
        await deployment.set(period=period, limit=50.0)
        await deployment.end(await deployment.start(f"before-{number}"), 50)
        next_month = datetime(int(day[:4]) + (day[5:7] == "12"), int(day[5:7]) % 12 + 1, 1, tzinfo=UTC)
        renewal = midnight if period is Period.DAY else next_month
        refusal = await deployment.retry_after()
        assert refusal is not None, (day, period)
        assert abs(refusal[1] + refusal[0] - renewal) < MARGIN / 2, (day, period)
        await deployment.set_clock(midnight + MARGIN)
        assert (await deployment.retry_after() is None) == (renewal == midnight), (day, period)
        if renewal == midnight:
            await deployment.end(await deployment.start(f"after-{number}"), 20)
            assert await deployment.retry_after() is None
            await deployment.end(await deployment.start(f"last-{number}"), 5)
            assert await deployment.retry_after() is not None, (day, period)
            assert await deployment.spent() == [50.0]


@pytest.mark.parametrize("is_read_before", [True, False])
async def test_each_end_is_in_its_hour_and_day(deployment: MidnightDeployment, is_read_before: bool) -> None:
    for day in LAST_DAYS[1::2]:
        midnight = datetime.fromisoformat(day).replace(tzinfo=UTC) + timedelta(days=1)
        ledger = Ledger(deployment.commands, [deployment.keys.model("m")])
        edge = int(midnight.timestamp())
        for moment, num in ((midnight - MARGIN, 3), (midnight + MARGIN, 4), (midnight + 4 * MARGIN, 5)):
            await deployment.set_clock(moment)
            await deployment.end(await deployment.start(f"{day} {num}"), num)
            if is_read_before:
                await ledger.read(edge - DAY_S, edge + DAY_S)
        hours = await ledger.read(edge - DAY_S, edge + DAY_S, step_s=HOUR_S)
        assert [(row.at - edge, row.sums.output) for row in hours] == [(-HOUR_S, 3), (0, 4), (HOUR_S, 5)]
        days = await ledger.read(edge - DAY_S, edge + DAY_S)
        assert [(row.at - edge, row.sums.output) for row in days] == [(-DAY_S, 3), (0, 9)]
