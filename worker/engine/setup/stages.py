"""Whether an engine has a batch in flight for each stage of its model."""

from __future__ import annotations

import structlog

from ...config.engine_config import EngineConfig
from ...models.loaded import LoadedModel
from ..execution.deterministic import TiledRunner
from ..execution.model_runner import ModelRunner
from ..execution.staged import StagedRunner
from ..ranks.sharded_forward import StagedShardedForward
from ..scheduling.batches.flights import Flights, OneFlight
from ..scheduling.batches.staged_batches import StagedBatches

log = structlog.get_logger(__name__)


def make_flights(config: EngineConfig, model: LoadedModel, runner: ModelRunner) -> Flights:
    """Return what holds the batches of the stages, over ``runner``; of an engine that has one batch, what says so."""
    num_stages = config.pipeline_parallel_size
    if num_stages == 1 or not isinstance(model.forward, StagedShardedForward):
        return OneFlight()
    if isinstance(runner, TiledRunner):
        log.warning(
            "one_batch_in_flight",
            num_stages=num_stages,
            reason="--deterministic computes a step of this model in several forwards: stages wait for each other",
        )
        return OneFlight()
    return StagedBatches(StagedRunner(runner, model.forward), num_stages)
