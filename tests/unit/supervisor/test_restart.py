"""When a dead engine is started again, by a clock of our own."""

from __future__ import annotations

import pytest

from penstock.shared.process.children import STABLE_AFTER_S
from penstock.worker.supervisor.restart import CRASH_LOOP_LIMIT, NEXT_PHASES, Death, Phase, RestartPolicy

BARREN = Death("it broke")
FERTILE = Death("it broke", num_tokens=1)
ASLEEP = Death("it broke", was_asleep=True)
EXTERNAL = Death("it was killed", is_external=True)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def policy(clock: Clock) -> RestartPolicy:
    """An engine that serves its first life."""
    policy = RestartPolicy(clock)
    policy.ready()
    return policy


def die_and_restart(policy: RestartPolicy, clock: Clock, death: Death, lives_for_s: float = 1.0) -> float:
    """End a serving life and begin the next; returns the delay between."""
    clock.now += lives_for_s
    policy.died(death)
    delay_s = policy.restart_in_s
    clock.now += delay_s
    assert policy.restart_in_s == 0
    policy.restarting()
    policy.ready()
    return delay_s


def test_a_sleeping_engine_restarts_immediately_and_is_never_given_up(policy: RestartPolicy, clock: Clock) -> None:
    for _ in range(2 * CRASH_LOOP_LIMIT):
        assert die_and_restart(policy, clock, ASLEEP) == 0
    policy.died(ASLEEP)
    policy.restarting()
    # Before it sleeps again.
    policy.died(ASLEEP)
    assert policy.restart_in_s == 0
    policy.restarting()
    policy.died(ASLEEP)
    assert policy.restart_in_s == 0.5
    assert policy.num_barren_deaths == 2


def test_delays_grow_with_deaths_in_a_row(policy: RestartPolicy, clock: Clock) -> None:
    delays = [die_and_restart(policy, clock, FERTILE) for _ in range(10)]
    assert delays == [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert policy.num_restarts == 10
    for _ in range(2000):
        die_and_restart(policy, clock, FERTILE)


def test_a_serving_engine_killed_from_outside_restarts_immediately(policy: RestartPolicy, clock: Clock) -> None:
    assert [die_and_restart(policy, clock, EXTERNAL) for _ in range(10)] == [0] * 10
    assert die_and_restart(policy, clock, FERTILE) == 0
    assert die_and_restart(policy, clock, FERTILE) == 0.5
    policy.died(EXTERNAL)
    policy.restarting()
    policy.died(EXTERNAL)  # before it was ready: whatever kills it may go on doing so
    assert policy.restart_in_s == 1


def test_a_long_life_ends_the_row(policy: RestartPolicy, clock: Clock) -> None:
    for _ in range(3):
        die_and_restart(policy, clock, FERTILE)
    assert die_and_restart(policy, clock, FERTILE, STABLE_AFTER_S - 1) == 2
    assert die_and_restart(policy, clock, FERTILE, STABLE_AFTER_S) == 0
    assert die_and_restart(policy, clock, FERTILE) == 0.5


def test_time_before_ready_is_no_life(policy: RestartPolicy, clock: Clock) -> None:
    """A model that takes minutes to load and then fails must not be loaded without a pause for ever."""
    die_and_restart(policy, clock, FERTILE)
    for delay_s in (0.5, 1, 2):
        policy.died(FERTILE)
        assert policy.restart_in_s == delay_s
        clock.now += delay_s
        policy.restarting()
        clock.now += 10 * STABLE_AFTER_S


def test_a_crash_loop_is_given_up(policy: RestartPolicy, clock: Clock) -> None:
    for _ in range(CRASH_LOOP_LIMIT - 1):
        die_and_restart(policy, clock, BARREN, STABLE_AFTER_S)
    policy.died(BARREN)
    assert policy.phase is Phase.GIVEN_UP
    policy.leave()
    assert policy.phase is Phase.GIVEN_UP


def test_tokens_end_a_crash_loop_and_deaths_from_outside_do_not_count(policy: RestartPolicy, clock: Clock) -> None:
    for _ in range(CRASH_LOOP_LIMIT - 1):
        die_and_restart(policy, clock, BARREN)
    for _ in range(CRASH_LOOP_LIMIT):
        die_and_restart(policy, clock, EXTERNAL)
    assert policy.num_barren_deaths == CRASH_LOOP_LIMIT - 1
    die_and_restart(policy, clock, FERTILE)
    assert policy.num_barren_deaths == 0


def test_illegal_changes_raise(policy: RestartPolicy) -> None:
    with pytest.raises(ValueError, match="serving cannot become restarting"):
        policy.restarting()
    policy.leave()
    for change in (policy.ready, policy.restarting, lambda: policy.died(BARREN)):
        with pytest.raises(ValueError, match="that is left cannot become"):
            change()
    assert policy.phase is Phase.LEFT


def test_every_phase_is_in_the_table() -> None:
    assert set(NEXT_PHASES) == set(Phase)
    assert set().union(*NEXT_PHASES.values()) == set(Phase)
