"""The layout: tenants in partitions, engines at homes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.errors import ConfigurationError
from penstock.shared.keys import Keys
from penstock.shared.partitions import Layout, home_order
from penstock.worker.config.engine_config import EngineConfig

TENANTS = [f"tenant{number}" for number in range(2000)]


def test_tenants_are_spread_evenly_and_more_partitions_move_only_those_that_they_take() -> None:
    before, after = Layout(version=1, num=4), Layout(version=2, num=5, num_before=4)
    counts = Counter(after.partition_of(tenant, "r") for tenant in TENANTS)
    assert all(300 < counts[number] < 500 for number in range(5))
    for tenant in TENANTS:
        former = after.former_partition_of(tenant)
        if after.partition_of(tenant, "r") == 4:
            assert former == before.partition_of(tenant, "r")
        else:
            assert former is None
            assert after.partition_of(tenant, "r") == before.partition_of(tenant, "r")


def test_a_spread_tenant_has_no_single_partition() -> None:
    layout = Layout(version=2, num=4, num_before=2, spread=("big",))
    assert {layout.partition_of("big", f"r{number}") for number in range(100)} == {0, 1, 2, 3}
    assert layout.former_partition_of("big") is None


@given(st.integers(1, 20), st.integers(1, 20))
def test_every_partition_has_an_equal_part_of_the_engines(num_engines: int, num_partitions: int) -> None:
    turns = 600
    first: Counter[int] = Counter()
    homes: set[int] = set()
    for rank in range(num_engines):
        for turn in range(turns):
            order = home_order(rank, num_engines, num_partitions, turn)
            assert len(set(order)) == len(order)
            first[order[0]] += 1
            homes.update(order)
    assert homes == set(range(num_partitions))
    mean = num_engines * turns / num_partitions
    assert all(abs(first[number] - mean) < 0.1 * mean + 4 * num_engines for number in range(num_partitions))


def test_the_first_partition_has_the_keys_of_the_model() -> None:
    keys = Keys("ns")
    assert keys.model("m", 0).prefix == keys.model("m").prefix == "ns:{m}:"
    assert keys.model("m", 3).prefix == "ns:{m#3}:"
    assert keys.model_of("ns:{m#3}:lane:x:y") == "m#3"


def test_no_model_has_the_name_of_a_partition() -> None:
    assert EngineConfig(model="m#x").model_name == "m#x"
    with pytest.raises(ConfigurationError, match="m#1"):
        EngineConfig(model="m", served_model_name="m#1")
