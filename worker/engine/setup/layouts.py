"""The layouts of an engine: which runner, batches in flight, core and control compute its steps together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Generic, TypeVar

import structlog

from ...config.engine_config import EngineConfig
from ...data_parallel.composition import grouped_core
from ...data_parallel.control import GroupedControl
from ...data_parallel.core import GroupedCore, LockstepRunner
from ...models.adapters.slots import AdapterSlots
from ...models.loaded import LoadedModel
from ...models.loading.fixed_shapes import is_invariant_in_any_size
from ...processes.progress import ProgressWriter
from ..control.calls import ControlledParts, EngineControl
from ..core.engine_core import EngineCore
from ..core.in_flight import LookaheadCore, PipelinedCore
from ..core.pooling import PoolingCore
from ..execution.batch import InputBatch
from ..execution.deterministic import DeterministicRunner, TiledRunner
from ..execution.model_runner import ModelRunner
from ..execution.overlap import FeedingRunner, OverlappingRunner, StagedRunner
from ..execution.pooling_runner import PoolingRunner
from ..scheduling.batches import BatchQueue, Flights, OneFlight, StagedBatches

_Runner = TypeVar("_Runner", bound=ModelRunner)
_Flights = TypeVar("_Flights", bound=Flights)
_Core = TypeVar("_Core", bound=EngineCore)

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Layout(Generic[_Runner, _Flights, _Core]):
    """The parts of an engine that compute its steps.

    Args:
        make_runner: create the executor.
        make_flights: create the batches in flight, which scheduler and core share.
        make_core: return the factory of the core, which takes the arguments of ``EngineCore``.
        make_control: create the answers to control calls.
    """

    make_runner: Callable[[LoadedModel, InputBatch, AdapterSlots | None], _Runner]
    make_flights: Callable[[LoadedModel, _Runner], _Flights]
    make_core: Callable[[LoadedModel, _Runner, _Flights], Callable[..., _Core]]
    make_control: Callable[[_Core, ControlledParts, ProgressWriter], EngineControl]


class Steps(Enum):
    """The kind of steps that an engine computes, one after the other unless the kind says otherwise."""

    POOLING = "results of texts instead of tokens"
    LOCKSTEP = "at the same time as the other ranks of a data-parallel group"
    PLAIN = "tokens"
    LOOKAHEAD = "tokens, and the next step is scheduled meanwhile"
    STAGED = "tokens, with one step in flight per stage of the model"


class Bits(Enum):
    """Influences on the bits of a token's logits."""

    ANY = "the batch"
    INVARIANT = "nothing, in a forward of any size"
    TILED = "nothing, in forwards of a few sizes"


def _one_flight(model: LoadedModel, runner: ModelRunner) -> OneFlight:
    return OneFlight()


def _staged_batches(model: LoadedModel, runner: ModelRunner) -> StagedBatches:
    return StagedBatches(StagedRunner(runner, model.staged_steps), model.num_stages)


def _plain_core(model: LoadedModel, runner: ModelRunner, flights: OneFlight) -> Callable[..., EngineCore]:
    return EngineCore


def _lookahead_core(model: LoadedModel, runner: ModelRunner, flights: OneFlight) -> Callable[..., LookaheadCore]:
    # A deterministic runner reads the numbers of its tokens on the host.
    feeds = model.device.type == "cuda" and not isinstance(runner, DeterministicRunner)
    return partial(LookaheadCore, BatchQueue(FeedingRunner(runner) if feeds else OverlappingRunner(runner)))


def _pipelined_core(model: LoadedModel, runner: ModelRunner, flights: StagedBatches) -> Callable[..., PipelinedCore]:
    return partial(PipelinedCore, flights)


def _pooling_core(model: LoadedModel, runner: PoolingRunner, flights: OneFlight) -> Callable[..., PoolingCore]:
    return partial(PoolingCore, runner.pooling)


def _grouped_core(model: LoadedModel, runner: LockstepRunner, flights: OneFlight) -> Callable[..., GroupedCore]:
    assert model.expert_ranks is not None, "the engine is not a rank"
    return grouped_core(model.expert_ranks, runner)


# Steps that are both staged and tiled are missing: the forwards of a step would wait for each other in every stage.
LAYOUTS: dict[tuple[Steps, Bits], Layout[Any, Any, Any]] = {
    (Steps.POOLING, Bits.ANY): Layout(PoolingRunner, _one_flight, _pooling_core, EngineControl),
    (Steps.LOCKSTEP, Bits.ANY): Layout(LockstepRunner, _one_flight, _grouped_core, GroupedControl),
    (Steps.PLAIN, Bits.ANY): Layout(ModelRunner, _one_flight, _plain_core, EngineControl),
    (Steps.PLAIN, Bits.INVARIANT): Layout(DeterministicRunner, _one_flight, _plain_core, EngineControl),
    (Steps.PLAIN, Bits.TILED): Layout(TiledRunner, _one_flight, _plain_core, EngineControl),
    (Steps.LOOKAHEAD, Bits.ANY): Layout(ModelRunner, _one_flight, _lookahead_core, EngineControl),
    (Steps.LOOKAHEAD, Bits.INVARIANT): Layout(DeterministicRunner, _one_flight, _lookahead_core, EngineControl),
    (Steps.LOOKAHEAD, Bits.TILED): Layout(TiledRunner, _one_flight, _lookahead_core, EngineControl),
    (Steps.STAGED, Bits.ANY): Layout(ModelRunner, _staged_batches, _pipelined_core, EngineControl),
    (Steps.STAGED, Bits.INVARIANT): Layout(DeterministicRunner, _staged_batches, _pipelined_core, EngineControl),
}


def choose_layout(config: EngineConfig, model: LoadedModel) -> Layout[Any, Any, Any]:
    """Return the layout for ``model``. For ``--deterministic`` this runs the model with a temporary cache.

    Call it after ``check_options``.
    """
    steps, bits = _steps_of(config, model), _bits_of(config, model)
    if (steps, bits) == (Steps.STAGED, Bits.TILED):
        log.warning(
            "one_batch_in_flight",
            num_stages=config.pipeline_parallel_size,
            reason="--deterministic runs several forwards per step of this model, so its stages wait for each other",
        )
        steps = Steps.PLAIN
    return LAYOUTS[steps, bits]


def _steps_of(config: EngineConfig, model: LoadedModel) -> Steps:
    if model.pooling is not None:
        return Steps.POOLING
    if model.expert_ranks is not None:
        return Steps.LOCKSTEP
    if config.pipeline_parallel_size > 1:
        return Steps.STAGED
    return Steps.LOOKAHEAD if config.looks_ahead else Steps.PLAIN


def _bits_of(config: EngineConfig, model: LoadedModel) -> Bits:
    if not config.deterministic:
        return Bits.ANY
    return Bits.INVARIANT if is_invariant_in_any_size(model) else Bits.TILED
