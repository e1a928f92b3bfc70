"""Decides whether an engine keeps one batch in flight per stage of its model."""

from __future__ import annotations

import structlog

from ...config.engine_config import EngineConfig
from ...models.loaded import LoadedModel
from ..execution.deterministic import TiledRunner
from ..execution.model_runner import ModelRunner
from ..execution.overlap import StagedRunner
from ..ranks.sharded_forward import StagedShardedForward
from ..scheduling.batches import Flights, OneFlight, StagedBatches

log = structlog.get_logger(__name__)


def make_flights(config: EngineConfig, model: LoadedModel, runner: ModelRunner) -> Flights:
    """Return the batches in flight of a staged model over ``runner``, or ``OneFlight`` for a single batch."""
    num_stages = config.pipeline_parallel_size
    if num_stages == 1 or not isinstance(model.forward, StagedShardedForward):
        return OneFlight()
    if isinstance(runner, TiledRunner):
        log.warning(
            "one_batch_in_flight",
            num_stages=num_stages,
            reason="--deterministic runs several forwards per step of this model, so its stages wait for each other",
        )
        return OneFlight()
    return StagedBatches(StagedRunner(runner, model.forward), num_stages)
