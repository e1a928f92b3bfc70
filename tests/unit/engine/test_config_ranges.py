"""Numbers that no engine can work with are refused where they are given, with their bound."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.errors import ConfigurationError
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig

ENGINE = ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_threads", "kv_cache_memory"]
WORKER = ["lease_ttl_s", "stall_timeout_s", "drain_timeout_s", "stream_interval_ms", "max_deliveries"]
HUGE = pytest.param(10**400, id="huge")


def make_engine(**options: Any) -> EngineConfig:
    return EngineConfig(model="m", **options)


def make_worker(**options: Any) -> WorkerConfig:
    return WorkerConfig(worker_id="w", engine_id="e", redis_url="", engine=EngineConfig(model="m"), **options)


@pytest.mark.parametrize("value", [-1, HUGE])
@pytest.mark.parametrize("name", [*ENGINE, "num_engines_on_host"])
def test_numbers_of_an_engine(name: str, value: int) -> None:
    bound = "least" if value < 0 else "most"
    with pytest.raises(ConfigurationError, match=rf"^{name}.* must be at {bound} [\d,]+, got ") as caught:
        make_engine(**{name: value})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [float("nan"), -1, float("inf"), HUGE])
@pytest.mark.parametrize("name", WORKER)
def test_numbers_of_a_worker_process(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name}.* must be at (least|most) [\d,.]+, got ") as caught:
        make_worker(**{name: value})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", [n for n in ENGINE if n != "num_threads"])
def test_zero_is_refused_where_it_means_nothing(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name} must be at least"):
        make_engine(**{name: 0})


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, float("nan")])
def test_a_share_of_the_memory_is_a_share(share: float) -> None:
    with pytest.raises(ConfigurationError, match=r"gpu_memory_utilization must be in \(0, 1\]"):
        EngineConfig(model="m", gpu_memory_utilization=share)


def test_meaningful_values_are_accepted() -> None:
    assert EngineConfig(model="m", num_threads=0, max_model_len=2, block_size=1).num_threads == 0
    assert make_worker(drain_timeout_s=0, stream_interval_ms=0, lease_ttl_s=0.1).drain_timeout_s == 0
