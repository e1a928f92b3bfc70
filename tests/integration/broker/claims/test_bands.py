"""Priority bands: the higher goes first, and what has waited long below it gets its part."""

from __future__ import annotations

import random
import time

import pytest

from penstock.shared.broker import Broker, Queue
from penstock.shared.errors import ValidationError
from penstock.shared.queue.policy import QueuePolicy

from ..conftest import enqueue, finish_with, take
from ..snapshot import read_snapshot

BANDS = ("interactive", "standard", "batch")


async def turns(broker: Broker, num_claims: int) -> list[str]:
    """Claim so many one by one and end them; returns the bands, by the first word of each id."""
    bands: list[str] = []
    for _ in range(num_claims):
        (claim,) = await take(broker, "e0", 1)
        bands.append(claim.request_id.partition("-")[0])
        await finish_with(broker, claim, num_output=10)
    return bands


async def fill(broker: Broker, band: str, num_requests: int, *, num_tokens: int = 100) -> None:
    ids = [f"{band}-{i}" for i in range(num_requests)]
    await enqueue(broker, *ids, band=band, num_prompt_tokens=num_tokens - 10, max_tokens=10)


async def test_the_higher_band_goes_first_whoever_asks(broker: Broker) -> None:
    for band in reversed(BANDS):
        for tenant in "ab":
            await enqueue(broker, f"{band}-{tenant}", band=band, tenant=tenant)
    assert await turns(broker, 3) == ["interactive", "interactive", "standard"]
    await fill(broker, "interactive", 1)
    assert await turns(broker, 4) == ["interactive", "standard", "batch", "batch"]


async def test_a_request_that_names_no_band_goes_into_the_default_one(broker: Broker, queue: Queue) -> None:
    await queue.configure(QueuePolicy(default_band="batch"))
    await enqueue(broker, "batch-0")
    await fill(broker, "standard", 1)
    assert await turns(broker, 2) == ["standard", "batch"]


async def test_an_unknown_band_is_refused_by_name(broker: Broker) -> None:
    with pytest.raises(ValidationError, match="band must be one of interactive, standard, batch, got 'urgent'"):
        await enqueue(broker, "a", band="urgent")
    assert await broker.state("a") is None


@pytest.mark.parametrize("strictness", [0.5, 0.75, 0.9])
async def test_aged_requests_get_the_share_left_by_the_strictness(
    broker: Broker, queue: Queue, strictness: float
) -> None:
    """Holds at every step, within one request."""
    await queue.configure(QueuePolicy(ageing_s=0.0, strictness=strictness))
    await fill(broker, "interactive", 200)
    await fill(broker, "batch", 200)
    given = {"interactive": 0, "batch": 0}
    for number, band in enumerate(await turns(broker, 200), start=1):
        given[band] += 100
        assert abs(given["batch"] - (1 - strictness) * 100 * number) <= 100


async def test_the_part_is_one_of_tokens_whatever_the_sizes(broker: Broker, queue: Queue) -> None:
    rng, strictness, size = random.Random(0), 0.8, {}
    await queue.configure(QueuePolicy(ageing_s=0.0, strictness=strictness))
    for number in range(150):
        for band, largest in (("interactive", 50), ("batch", 400)):
            size[f"{band}-{number}"] = rng.randint(1, largest)
            await enqueue(broker, f"{band}-{number}", band=band, num_prompt_tokens=size[f"{band}-{number}"])
    given = {"interactive": 0, "batch": 0}
    for _ in range(150):
        (claim,) = await take(broker, "e0", 1)
        given[claim.request_id.partition("-")[0]] += size[claim.request_id]
        await finish_with(broker, claim, num_output=0)
        assert abs(given["batch"] - (1 - strictness) * sum(given.values())) <= 400


async def test_three_aged_bands_share_level_by_level(broker: Broker, queue: Queue) -> None:
    await queue.configure(QueuePolicy(ageing_s=0.0, strictness=0.5))
    for band in BANDS:
        await fill(broker, band, 100)
    bands = await turns(broker, 80)
    assert [bands.count(band) for band in BANDS] == pytest.approx([40, 20, 20], abs=1)


async def test_work_that_has_not_aged_waits(broker: Broker, queue: Queue) -> None:
    await queue.configure(QueuePolicy(ageing_s=600.0, strictness=0.5))
    await fill(broker, "batch", 10)
    await fill(broker, "interactive", 10)
    assert await turns(broker, 10) == ["interactive"] * 10


@pytest.mark.parametrize(
    ("band", "age_s", "is_aged"),
    [("standard", 590, False), ("standard", 610, True), ("interactive", 1190, False), ("interactive", 1210, True)],
)
async def test_work_ages_by_one_band_at_a_time(
    broker: Broker, queue: Queue, commands, band: str, age_s: float, is_aged: bool
) -> None:
    await queue.configure(QueuePolicy(ageing_s=600.0, strictness=0.5))
    for name in (band, "batch"):
        await fill(broker, name, 6)
    heads = broker.keys.prefix + "heads:batch"
    arrived_ms = float(await commands.execute("ZSCORE", heads, "default"))
    await commands.execute("ZADD", heads, "XX", arrived_ms - age_s * 1000, "default")
    # The request behind it has not aged, however long the first has waited.
    assert await turns(broker, 4) == ([band, "batch", band, band] if is_aged else [band] * 4)


async def test_work_ages_while_it_waits(broker: Broker, queue: Queue) -> None:
    await queue.configure(QueuePolicy(ageing_s=0.05, strictness=0.5))
    started_at, num_claims = time.monotonic(), 0
    await fill(broker, "batch", 1)
    while True:
        await enqueue(broker, f"interactive-{num_claims}", band="interactive", num_prompt_tokens=100)
        if await turns(broker, 1) == ["batch"]:
            break
        num_claims += 1
        assert time.monotonic() < started_at + 60
    # Two bands up; the server counts whole milliseconds.
    assert time.monotonic() > started_at + 0.099


@pytest.mark.parametrize("policy", [QueuePolicy(ageing_s=0.0, strictness=1.0), QueuePolicy(ageing_s=None)])
async def test_strict_bands_starve_the_lower(broker: Broker, queue: Queue, policy: QueuePolicy) -> None:
    await queue.configure(policy)
    await fill(broker, "batch", 5)
    await fill(broker, "interactive", 30)
    assert await turns(broker, 35) == ["interactive"] * 30 + ["batch"] * 5


async def test_a_band_is_removed_only_when_nothing_waits_in_it(broker: Broker, queue: Queue, commands) -> None:
    without = QueuePolicy(bands=("interactive", "standard"))
    await fill(broker, "batch", 2)
    await turns(broker, 1)
    with pytest.raises(ValidationError, match="bands must keep batch while requests wait there"):
        await queue.configure(without)
    assert (await queue.policy()).bands == BANDS
    (claim,) = await take(broker, "e0", 1)
    # What runs may end, and take more than was expected, in a band that is gone.
    await queue.configure(without)
    await finish_with(broker, claim, num_output=20)
    with pytest.raises(ValidationError, match="got 'batch'"):
        await enqueue(broker, "a", band="batch")
    found = await read_snapshot(commands, broker.keys)
    assert "batch" not in found.of("idle")
    assert not [name for name in found.one("queue") if name.endswith(":batch")]


async def test_bands_may_be_added_and_put_into_another_order(broker: Broker, queue: Queue) -> None:
    for band in ("interactive", "standard"):
        await fill(broker, band, 2)
    await queue.configure(QueuePolicy(bands=("now", "standard", "interactive", "batch")))
    await fill(broker, "now", 1)
    assert await turns(broker, 5) == ["now", "standard", "standard", "interactive", "interactive"]


async def test_requeued_requests_precede_every_band(broker: Broker) -> None:
    await fill(broker, "batch", 1)
    (claim,) = await take(broker, "e0", 1)
    await fill(broker, "interactive", 1)
    await broker.release([(claim.request_id, claim.epoch)])
    assert await turns(broker, 2) == ["batch", "interactive"]
