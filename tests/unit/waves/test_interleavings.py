"""Every order in which a small group's events can come, and drawn ones of larger groups.

Promises: all ranks enter the same collectives, waves end together, no request waits for ever, and no rank computes
while no rank has work. ``group_model.py`` checks them at each event and at each end.
"""

from __future__ import annotations

import sys
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.worker.data_parallel.wave import Wave

from .group_model import Group, Rank


def group(*arrivals: tuple[int, ...], interval: int = 2, orders: dict[int, tuple[str, ...]] | None = None) -> Group:
    orders = orders or {}
    ranks = [
        Rank(Wave(len(arrivals), interval), arrivals=those, orders=orders.get(number, ()))
        for number, those in enumerate(arrivals)
    ]
    return Group(ranks)


class Exploration:
    """Counts the states that can be reached, and the orders of events that lead to an end."""

    def __init__(self) -> None:
        self.num_orders: dict[Any, int] = {}
        self.on_the_way: set[Any] = set()

    def explore(self, state: Group) -> int:
        key = state.key()
        if key in self.num_orders:
            return self.num_orders[key]
        assert key not in self.on_the_way, "events that lead back to where they began"
        self.on_the_way.add(key)
        events = state.events()
        if not events:
            state.check_end()
        num_orders = 0 if events else 1
        for event in events:
            num_orders += self.explore(state.after(event))
        self.on_the_way.remove(key)
        self.num_orders[key] = num_orders
        return num_orders


@pytest.fixture(autouse=True)
def deep_recursion() -> Any:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    yield
    sys.setrecursionlimit(before)


def with_faults(state: Group, *, losses: int, doubles: int) -> Group:
    state.losses, state.doubles = losses, doubles
    return state


PAUSE, RESUME, LEAVE = "request_pause", "resume", "request_leave"
# With the numbers of states and of orders: a model that has stopped to offer an event would pass for a good one.
SCENES = {
    "a request each, of different lengths": (lambda: group((1,), (3,)), 751, 2_084_558_976),
    "requests that come at any point of a wave and of its end": (lambda: group((1, 1), (2,)), 2_181, 51_009_589_936),
    "messages lost and doubled": (
        lambda: with_faults(group((1, 1), (1,)), losses=1, doubles=1),
        14_165,
        12_766_155_953_704,
    ),
    "three ranks": (lambda: group((1,), (2,), ()), 1_912, 165_205_103_511_636_000),
    "three ranks, a message lost": (
        lambda: with_faults(group((1,), (1,), ()), losses=1, doubles=0),
        4_333,
        1_462_621_268_742_120_000,
    ),
    "a pause of all, and work meanwhile": (
        lambda: group((1,), (), orders={0: (PAUSE, RESUME), 1: (PAUSE, RESUME)}),
        12_342,
        754_381_272_840,
    ),
    "a pause that one rank alone wants": (
        lambda: group((1,), (2,), orders={0: (PAUSE, RESUME)}),
        6_352,
        183_280_478_544,
    ),
    "a rank that wants all to leave": (
        lambda: with_faults(group((1,), (2,), orders={1: (LEAVE,)}), losses=1, doubles=1),
        7_873,
        29_734_203_321,
    ),
}


@pytest.mark.parametrize("name", SCENES)
def test_every_order_of_events_ends_well(name: str) -> None:
    make, *counts = SCENES[name]
    exploration = Exploration()
    num_orders = exploration.explore(make())
    assert (len(exploration.num_orders), num_orders) == tuple(counts)


@settings(deadline=None)
@given(st.data())
def test_drawn_orders_of_larger_groups_end_well(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 6), label="ranks")
    requests = st.lists(st.integers(1, 20), max_size=4).map(tuple)
    wishes = st.lists(st.sampled_from([(PAUSE, RESUME), (PAUSE, RESUME), (LEAVE,)]), max_size=2).map(
        lambda parts: tuple(order for part in parts for order in part)
    )
    arrivals = [data.draw(requests, label="requests") for _ in range(size)]
    orders = {rank: data.draw(wishes, label="orders") for rank in range(size)}
    state = group(*arrivals, interval=data.draw(st.sampled_from([1, 2, 16]), label="interval"), orders=orders)
    state = with_faults(state, losses=data.draw(st.integers(0, 5)), doubles=data.draw(st.integers(0, 5)))
    # To draw each choice would take ten times as long as all else here.
    random = Random(data.draw(st.integers(0, 2**32), label="seed of the order"))
    while events := state.events():
        state.happen(random.choice(events))
    state.check_end()


def test_an_idle_group_makes_no_collective() -> None:
    state = group((1,), ())
    while events := state.events():
        state.happen(events[0])
    before = [rank.at for rank in state.ranks]
    # Messages on their way when the wave ended.
    for rank in state.ranks:
        for number in range(rank.wave.number):
            rank.wave.receive_start(number)
    assert state.events() == []
    assert [rank.at for rank in state.ranks] == before
