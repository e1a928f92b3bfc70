"""The signal for autoscalers: by hand, and through curves of load with a model of KEDA behind it."""

from __future__ import annotations

import math
from random import Random

from .autoscaler import Deployment

SPEED = 1000.0
# Engines hold for some seconds what they have claimed.
KV_TOKENS, START_S, MAX_REPLICAS = 8000.0, 40.0, 8
HOUR_S = 3600


def deployment() -> Deployment:
    return Deployment(SPEED, KV_TOKENS, START_S, MAX_REPLICAS)


def test_a_steady_load_settles_and_nothing_starves() -> None:
    run = deployment()
    run.run(HOUR_S, lambda now: 2.5 * SPEED)
    assert run.num_turns() <= 1
    # The work of 2.5 engines, filled to four fifths, wants 3.1; what is within a tenth is left alone.
    assert set(run.replicas[-1200:]) == {3}
    assert run.arrived - run.served <= 2.5 * KV_TOKENS  # what runs, and nothing that waits


def test_a_burst_is_served_and_all_engines_leave_after_it() -> None:
    run = deployment()
    run.run(2 * HOUR_S, lambda now: 6 * SPEED if 600 <= now < 900 else 0.0)
    assert run.replicas[:600] == [0] * 600
    assert max(run.replicas) >= 5
    assert run.arrived - run.served < 1  # the last token takes for ever in a fluid
    assert run.num_turns() == 1
    assert run.replicas[-1] == 0


def test_a_day_is_followed() -> None:
    """From nothing at night to five engines' load at noon."""
    run = deployment()
    day_s = 24 * HOUR_S

    def load(now: int) -> float:
        return max(0.0, -5 * SPEED * math.cos(2 * math.pi * now / day_s))

    run.run(day_s, load)
    assert run.replicas[0] == run.replicas[-1] == 0
    assert 5 <= max(run.replicas) <= 7
    assert run.arrived - run.served < 1
    assert run.num_turns() <= 6
    assert run.longest_wait_s < 120


def test_noise_around_a_boundary_does_not_swing() -> None:
    run, random = deployment(), Random(0)
    run.run(4 * HOUR_S, lambda now: 2 * SPEED * random.uniform(0.2, 1.8))
    steady = run.replicas[HOUR_S:]
    assert max(steady) - min(steady) <= 1
    assert run.num_turns() <= 8
