"""Devices of several hosts that share models without a leader, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from penstock.ops.sim.reports.figures import Check
from penstock.ops.sim.reports.report import make_report
from penstock.ops.sim.scenario import Deaths, Engines, Scenario, Speed, Swaps, Tenants
from penstock.ops.sim.shapes import Constant, Crowds, Fixed
from penstock.ops.sim.simulation import Simulated, simulate
from penstock.shared.broker import Grant, GrantReply, Homes

ENGINES = Engines(
    number=1,
    models=["hot", "cold"],
    max_num_seqs=8,
    speed=Speed(fixed_ms=20, ms_per_seq=1, ms_per_prompt_token=0.1),
    swaps=Swaps(sleep_s=0.2, wake_s=5.0),
)
HOT = Tenants(
    name="hot",
    model="hot",
    band="interactive",
    arrivals=Constant(per_s=1),
    prompt=Fixed(tokens=100),
    output=Fixed(tokens=20),
)
COLD = msgspec.structs.replace(HOT, name="cold", model="cold", arrivals=Crowds(number=3, every_s=40, from_s=40))


def engines(wake_s: float, number: int = 1) -> Engines:
    return msgspec.structs.replace(ENGINES, number=number, swaps=Swaps(sleep_s=0.2, wake_s=wake_s))


# The first device is dear.
DEAR_AND_CHEAP = [engines(60.0), engines(4.0)]


def checks_of(simulated: Simulated) -> dict[str, Check]:
    return {check.name: check for check in make_report(simulated).figures.checks}


def run(
    url: str,
    namespace: str,
    kinds: Sequence[Engines],
    *tenants: Tenants,
    duration_s: float,
    deaths: Sequence[Deaths] = (),
) -> list[tuple[float, str, int]]:
    """Simulate, and return the time at which each swap began, its model and its device, in order."""
    scenario = Scenario(duration_s=duration_s, engines=list(kinds), tenants=list(tenants), deaths=list(deaths))
    simulated = simulate(url, scenario, namespace)
    assert [check for check in checks_of(simulated).values() if not check.holds] == []
    logs = enumerate(simulated.swap_logs)
    return sorted((swap.start_s, swap.entering, number) for number, log in logs for swap in log.swaps)


def test_one_of_a_hundred_homes_loads_a_model_for_longer_than_a_lease(redis_url: str, namespace: str) -> None:
    homes = msgspec.structs.replace(engines(4.0, number=100), models=["hot"])
    swaps = run(redis_url, namespace, [homes], HOT, duration_s=6)
    assert [model for _, model, _ in swaps] == ["hot"]


def test_the_cheapest_home_wakes_the_model(redis_url: str, namespace: str) -> None:
    swaps = run(redis_url, namespace, DEAR_AND_CHEAP, HOT, duration_s=30)
    assert [device for _, _, device in swaps] == [1]


@pytest.mark.parametrize("death_s", [0.3, 3.0])
def test_a_home_that_dies_asleep_or_while_it_loads_is_passed_within_a_lease(
    redis_url: str, namespace: str, death_s: float
) -> None:
    """The dear one would leave the model to the cheap one for 57 s, if that lived."""
    deaths = [Deaths(at_s=death_s, number=1)]
    ((start_s, _, device),) = run(redis_url, namespace, DEAR_AND_CHEAP, HOT, duration_s=70, deaths=deaths)
    assert device == 0
    assert start_s <= death_s + 3 + 1 + 0.25


def test_a_free_device_that_leaves_a_model_asleep_fails_a_check(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put_off(*args: object, **how: object) -> Grant:
        return Grant(GrantReply.LATER, 1000.0)

    monkeypatch.setattr(Homes, "request_grant", put_off)
    simulated = simulate(redis_url, Scenario(duration_s=8, engines=[ENGINES], tenants=[HOT]), namespace)
    assert not checks_of(simulated)["a free device wakes a model within a lease and its patience"].holds


def test_more_devices_wake_a_model_that_needs_them_and_one_of_those_leaves_it_first(
    redis_url: str, namespace: str
) -> None:
    """Let one engine serve 13 requests a second. All three devices work when the cold model needs one."""
    hot = msgspec.structs.replace(HOT, arrivals=Constant(per_s=20))
    other = msgspec.structs.replace(HOT, name="other", model="other", arrivals=Constant(per_s=11))
    three = msgspec.structs.replace(engines(2.0, number=3), models=["hot", "cold", "other"])
    swaps = run(redis_url, namespace, [three], hot, COLD, other, duration_s=45)
    awake = dict(device_model(swaps, 40))
    (device,) = [device for at_s, model, device in swaps if model == "cold"]
    assert sorted(awake.values()) == ["hot", "hot", "other"]
    assert awake[device] == "hot"


def device_model(swaps: Sequence[tuple[float, str, int]], before_s: float) -> list[tuple[int, str]]:
    """Return the models that each device woke before a time, in order."""
    return [(device, model) for at_s, model, device in swaps if at_s < before_s]


def test_deaths_of_devices_and_returns_lose_nothing(redis_url: str, namespace: str) -> None:
    deaths = [Deaths(at_s=at_s, number=2, back_after_s=10) for at_s in (5, 25.5)]
    crowds = msgspec.structs.replace(COLD, arrivals=Crowds(number=3, every_s=10, from_s=5))
    swaps = run(redis_url, namespace, [engines(2.0, number=3)], HOT, crowds, duration_s=50, deaths=deaths)
    assert max(device for *_, device in swaps) >= 3
