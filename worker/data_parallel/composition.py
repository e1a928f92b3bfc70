"""Makes of the parts of an engine those of a rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ...shared.errors import ConfigurationError
from ..config.engine_config import EngineConfig
from ..models.loaded import LoadedModel
from ..models.shared_experts.ranks import ExpertRanks
from .core import GroupedCore
from .runner import LockstepRunner
from .wave import Flags, Wave

# Ways of computing that run the model once in a step.
_MODES_OF_ONE_FORWARD = ("lean", "packed")


def grouped_core(ranks: ExpertRanks, runner: LockstepRunner) -> Callable[..., GroupedCore]:
    """Return what makes a rank's core, called as ``EngineCore`` is."""

    def meet(flags: Flags) -> Flags:
        sums = ranks.sum_of(torch.tensor(flags, dtype=torch.int64))
        return Flags(*sums.tolist())

    return partial(GroupedCore, Wave(ranks.size), meet, runner)


def meet_ranks(config: EngineConfig) -> ExpertRanks | None:
    """Find the other ranks, before anything is loaded; None of an engine that is no rank.

    Raises:
        ConfigurationError: nobody has said which rank this is.
        GroupBrokenError: the others do not come.
    """
    if not config.is_grouped:
        return None
    if config.place is None:
        raise ConfigurationError(
            "data_parallel_size is for worker start: Redis says which rank an engine is, and one alone has all experts"
        )
    return ExpertRanks.meet(config.place, config.device, config.data_parallel_address)


def check_rank(model: LoadedModel) -> None:
    """Refuse a model that could not step with others, where it is to."""
    if model.expert_ranks is None:
        return
    if model.pooling is not None:
        raise ConfigurationError(f"data_parallel_size is for models that generate, and {model.architecture} pools here")
    if model.forward.mode not in _MODES_OF_ONE_FORWARD:
        raise ConfigurationError(
            f"data_parallel_size: {model.architecture} is computed in several forwards a step ({model.forward.mode}), "
            "and the ranks of a group make one each"
        )
    if model.forward.keeps_state:
        raise ConfigurationError(
            f"data_parallel_size: {model.architecture} keeps states besides keys and values, which ranks of a group do "
            "not; use data_parallel_size 1, and more engines"
        )
    if model.vision is not None:
        model.vision = None
        model.image_refusal = "an engine of a data-parallel group takes no images"
