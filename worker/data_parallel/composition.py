"""Builds the core of a rank, and checks that the model can be served by ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ...shared.errors import ConfigurationError
from ..config.engine_config import EngineConfig
from ..models.loaded import LoadedModel
from ..models.shared_experts import ExpertRanks
from .core import GroupedCore, LockstepRunner
from .wave import Flags, Wave

# The compute modes that run the model once per step.
_MODES_OF_ONE_FORWARD = ("lean", "packed")


def grouped_core(ranks: ExpertRanks, runner: LockstepRunner) -> Callable[..., GroupedCore]:
    """Return a factory of the rank's core, with the arguments of ``EngineCore``."""

    def meet(flags: Flags) -> Flags:
        sums = ranks.sum_of(torch.tensor(flags, dtype=torch.int64))
        return Flags(*sums.tolist())

    return partial(GroupedCore, Wave(ranks.size), meet, runner)


def meet_ranks(config: EngineConfig) -> ExpertRanks | None:
    """Connect to the other ranks before anything is loaded; return None for an engine that is not a rank.

    Raises:
        ConfigurationError: this engine has been assigned no rank.
        GroupBrokenError: the other ranks do not connect.
    """
    if not config.is_grouped:
        return None
    if config.place is None:
        raise ConfigurationError(
            "data_parallel_size needs worker start, since Redis assigns the ranks; leave it out for an engine alone"
        )
    return ExpertRanks.meet(config.place, config.device, config.data_parallel_address)


def check_rank(model: LoadedModel) -> LoadedModel:
    """Return ``model``, without images if this engine is a rank.

    Raises:
        ConfigurationError: the model cannot step with other ranks; the message says why.
    """
    if model.expert_ranks is None:
        return model
    if model.pooling is not None:
        raise ConfigurationError(
            f"data_parallel_size is for models that generate, and {model.architecture} is served for pooling here"
        )
    if model.forward.mode not in _MODES_OF_ONE_FORWARD:
        raise ConfigurationError(
            f"data_parallel_size: {model.architecture} needs several forwards per step ({model.forward.mode}), "
            "but the ranks of a group run one; leave it out"
        )
    if model.forward.keeps_state:
        raise ConfigurationError(
            f"data_parallel_size: {model.architecture} keeps states besides keys and values, which ranks of a group "
            "cannot; use data_parallel_size 1 and more engines"
        )
    if model.vision is None:
        return model
    return replace(model, vision=None, image_refusal="an engine of a data-parallel group takes no images")
