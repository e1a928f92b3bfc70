"""Which engines have a batch in flight for each stage of their model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from structlog.testing import capture_logs

from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.execution.deterministic import DeterministicRunner, TiledRunner
from penstock.worker.engine.ranks.sharded_forward import StagedShardedForward
from penstock.worker.engine.scheduling.batches import OneFlight, StagedBatches
from penstock.worker.engine.setup.stages import make_flights


def test_an_engine_has_a_batch_for_each_stage_or_says_why_not() -> None:
    staged: Any = SimpleNamespace(forward=object.__new__(StagedShardedForward))
    runner: Any = object.__new__(DeterministicRunner)
    staging = EngineConfig(model="m", pipeline_parallel_size=2, deterministic=True)
    assert isinstance(make_flights(staging, staged, runner), StagedBatches)
    assert isinstance(make_flights(EngineConfig(model="m"), staged, runner), OneFlight)
    with capture_logs() as told:
        assert isinstance(make_flights(staging, staged, object.__new__(TiledRunner)), OneFlight)
    assert [entry["event"] for entry in told] == ["one_batch_in_flight"]
