"""Options that go with data-parallel groups, and the engines of a host that form one."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.errors import ConfigurationError
from penstock.shared.process.command_line import UsageError
from penstock.worker.cli.plan import group_engines
from penstock.worker.config.data_parallel import RankPlace
from penstock.worker.config.engine_config import EngineConfig


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"deterministic": True}, "deterministic"),
        ({"async_scheduling": True}, "async_scheduling"),
        ({"device": "cuda"}, "enforce_eager"),
        ({"engine": "vllm"}, "engine 'vllm'"),
    ],
)
def test_options_that_change_forwards_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    EngineConfig(model="m", **options)
    with pytest.raises(ConfigurationError, match=f"data_parallel_size 2 cannot go with .*{named}"):
        EngineConfig(model="m", data_parallel_size=2, **options)


def test_a_group_of_several_hosts_needs_an_address() -> None:
    with pytest.raises(ConfigurationError, match="data_parallel_group needs data_parallel_address"):
        EngineConfig(model="m", data_parallel_size=2, data_parallel_group="big")
    with pytest.raises(ConfigurationError, match="data_parallel_address is for data-parallel groups"):
        EngineConfig(model="m", data_parallel_address="10.0.0.1")
    with pytest.raises(ConfigurationError, match="braces"):
        EngineConfig(model="m", data_parallel_group="{}", data_parallel_address="10.0.0.1")


def test_engines_of_a_host_form_their_own_group_or_the_named_one() -> None:
    grouped = group_engines(EngineConfig(model="m", data_parallel_size=2), 4, "here")
    assert [one.data_parallel_group for one in grouped] == ["here-0", "here-0", "here-1", "here-1"]
    named = EngineConfig(model="m", data_parallel_size=2, data_parallel_group="big", data_parallel_address="10.0.0.1")
    assert group_engines(named, 3, "here") == [named] * 3
    alone = EngineConfig(model="m")
    assert group_engines(alone, 3, "here") == [alone] * 3
    with pytest.raises(UsageError, match="does not divide the 3 engines"):
        group_engines(EngineConfig(model="m", data_parallel_size=2), 3, "here")


def test_a_place_reaches_the_core() -> None:
    place = RankPlace(generation=1_763_931_000_000_000, rank=1, size=2, address="127.0.0.1:4711", timeout_s=7.5)
    config = EngineConfig(model="m", data_parallel_size=2, place=place)
    assert EngineConfig.decode(config.encode()) == config
