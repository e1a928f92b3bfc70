from __future__ import annotations

from random import Random

import pytest

from penstock.ops.sim.shapes import (
    Arrivals,
    Burst,
    Constant,
    Crowds,
    Day,
    Fixed,
    Lognormal,
    Uniform,
    arrival_times,
    divided,
)


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        (Constant(per_s=50), 5000),
        (Burst(per_s=10, burst_per_s=200, at_s=40, for_s=20), 800 + 4000),
        (Day(low_per_s=10, high_per_s=90, period_s=50), 5000),
    ],
)
def test_arrivals_match_the_curve(arrivals: Arrivals, expected: int) -> None:
    times = list(arrival_times(arrivals, Random(0), 100.0))
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 100
    assert abs(len(times) - expected) < 4 * expected**0.5


def test_a_burst_is_at_its_stated_time() -> None:
    times = list(arrival_times(Burst(burst_per_s=100, at_s=3, for_s=2), Random(0), 10.0))
    assert times
    assert all(3 <= at_s < 5 for at_s in times)


def test_crowds_arrive_together_among_others() -> None:
    crowds = Crowds(per_s=5, number=3, every_s=10, from_s=2)
    times = list(arrival_times(crowds, Random(0), 30.0))
    assert times == sorted(times)
    assert [times.count(at_s) for at_s in (2.0, 12.0, 22.0)] == [3, 3, 3]
    assert abs(len(times) - 9 - 150) < 4 * 150**0.5


def test_a_part_of_arrivals_has_its_share_of_the_rates_and_whole_crowds() -> None:
    assert divided(Day(low_per_s=1, high_per_s=9), 2) == Day(low_per_s=0.5, high_per_s=4.5)
    assert divided(Crowds(per_s=4, number=3, every_s=10), 2) == Crowds(per_s=2, number=3, every_s=10)


def test_a_day_is_lowest_at_its_ends() -> None:
    day = Day(low_per_s=1, high_per_s=9, period_s=100)
    assert [round(day.rate(at_s), 6) for at_s in (0, 25, 50, 75, 100)] == [1, 5, 9, 5, 1]


def test_a_rate_of_zero_has_no_arrivals() -> None:
    assert list(arrival_times(Constant(per_s=0), Random(0), 100.0)) == []


def test_lengths_keep_to_their_bounds() -> None:
    random = Random(0)
    assert Fixed(tokens=7).draw(random) == 7
    uniform = [Uniform(least=3, most=5).draw(random) for _ in range(200)]
    assert set(uniform) == {3, 4, 5}
    lengths = sorted(Lognormal(median=100, sigma=0.5, most=250).draw(random) for _ in range(2001))
    assert lengths[0] >= 1
    assert lengths[-1] == 250
    assert 90 < lengths[1000] < 110
