"""Which models several ranks can share, and how. Others are rejected with a message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ....shared.errors import ConfigurationError, ModelLoadError
from ...config.engine_config import EngineConfig
from ..images.vision_model import is_vision_type, needs_vision_inputs
from ..parallel.groups import RankGroups
from ..parallel.layout import ParallelLayout
from ..pooling.folder import pools

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Decoders that differ only in biases, norms of heads, windows, and the kind of feed-forward part.
_CUT_BY_US = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "MixtralForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
# Text decoders of models that read images: the same ones; Qwen's, which rotate by positions in three axes; and Gemma's,
# in which tokens of an image attend to each other.
_TEXT_DECODERS_CUT_BY_US = frozenset(
    {
        "gemma3_text",
        "llama",
        "mistral",
        "qwen2",
        "qwen2_5_vl_text",
        "qwen2_vl_text",
        "qwen3",
        "qwen3_vl_moe_text",
        "qwen3_vl_text",
    }
)


def is_cut_by_us(model_config: PretrainedConfig, architecture: str, layout: ParallelLayout) -> bool:
    """Whether a rank reads the whole model and cuts its part; else transformers' plan determines the part that it
    reads.
    """
    if layout.is_expert_parallel:
        return False
    if is_vision_type(model_config):
        return model_config.get_text_config().model_type in _TEXT_DECODERS_CUT_BY_US
    return architecture in _CUT_BY_US


def check_kind(
    folder: Path, model_config: PretrainedConfig, architecture: str, config: EngineConfig, layout: ParallelLayout
) -> None:
    """Raise ``ConfigurationError`` for a model that several ranks cannot compute."""
    fact = ""
    if pools(folder, model_config, config.runner):
        fact = "a model that pools is computed by one rank"
    elif is_vision_type(model_config):
        _check_vision(model_config, architecture, layout)
    if fact:
        raise ConfigurationError(
            f"{describe_layout(layout)}, but {fact} ({architecture}): use tensor_parallel_size 1 and "
            f"pipeline_parallel_size 1, and more engines"
        )


def _check_vision(model_config: PretrainedConfig, architecture: str, layout: ParallelLayout) -> None:
    """Raise ``ConfigurationError`` for a model that reads images if the ranks of ``layout`` cannot share it."""
    kind = model_config.get_text_config().model_type
    if kind not in _TEXT_DECODERS_CUT_BY_US:
        raise ConfigurationError(
            f"{describe_layout(layout)}, but {architecture} reads images, and ranks do not share its text decoder "
            f"({kind}): use tensor_parallel_size 1 and pipeline_parallel_size 1, and more engines"
        )
    if layout.is_expert_parallel:
        raise ConfigurationError(
            f"enable_expert_parallel is set, but {architecture} reads images, and ranks share a part of each expert of "
            f"such models; leave it out"
        )
    if layout.pipeline > 1 and needs_vision_inputs(model_config):
        raise ConfigurationError(
            f"pipeline_parallel_size is {layout.pipeline}, but {architecture} has positions in three axes, which are "
            f"computed in one stage; use tensor_parallel_size {layout.world_size} instead"
        )


@contextmanager
def explaining_ranks(groups: RankGroups | None) -> Iterator[None]:
    """Add to a load error that the model is loaded by several ranks, if it is."""
    try:
        yield
    except ModelLoadError as error:
        if groups is None:
            raise
        raise ModelLoadError(
            f"{describe_layout(groups.layout)}, and several ranks support only the modes lean and packed: {error}; "
            f"use tensor_parallel_size 1 and pipeline_parallel_size 1, which has other modes"
        ) from error


def describe_layout(layout: ParallelLayout) -> str:
    if layout.tensor == 1:
        return f"pipeline_parallel_size is {layout.pipeline}"
    return f"tensor_parallel_size is {layout.tensor}"
