"""A model of transformers as it is read to be computed: whole, or the part of one of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ...shared.errors import ConfigurationError, ModelLoadError
from ..config.engine_config import EngineConfig
from .checks.conformance import Truth
from .formats.declared import declared_quantization
from .images.seeing import is_seeing_type
from .lean.part import plan_of_part
from .lean.plan import DecoderPlan
from .lean.reading.decoder import read_decoder
from .own_module import read_module
from .parallel.cut import check_layout, cut_decoder
from .parallel.groups import RankGroups
from .parallel.layout import ParallelLayout
from .parallel.planned import chosen_device, planned_options
from .pooling.folder import pools
from .ways.candidates import MODES, find_truth
from .weights.movable import return_free_memory

# Decoders that differ in nothing but biases, norms of heads, windows, and what the feed-forward part is.
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


@dataclass
class ReadModel:
    """What is to be computed here.

    Args:
        module: on its device; with what one rank holds, and logits that are whole at rank 0, where there are ranks.
        truth: what the model does on its own; None where ``module`` can still be asked.
        modes: in which it may be computed.
        num_parameters: of the whole model.
        plan: how the lean path computes the rank's part; None where ``module`` shows it.
    """

    module: PreTrainedModel
    truth: Truth | None
    modes: Collection[str]
    num_parameters: int
    plan: DecoderPlan | None = None


def read_model(
    folder: Path,
    model_config: PretrainedConfig,
    architecture: str,
    config: EngineConfig,
    device: torch.device,
    groups: RankGroups | None,
    max_model_len: int | None = None,
) -> ReadModel:
    """Read the model in ``folder``; of several ranks each does so at the same time, and has its part.

    Args:
        max_model_len: of the longest request; None to have the weights alone, without what they are checked against.

    Raises:
        ModelLoadError: as ``read_module``.
        ConfigurationError: ranks cannot share the model; names the option and what to do.
    """
    if groups is None:
        module = read_module(folder, model_config, architecture, config, device)
        return ReadModel(module, None, MODES, _num_parameters(module))
    _check_kind(folder, model_config, architecture, config, groups.layout)
    read = _cut_part if _is_cut_by_us(architecture, groups.layout) else _planned_part
    part = read(folder, model_config, architecture, config, device, groups, max_model_len)
    # All that was read and is another's.
    return_free_memory()
    return part


def _is_cut_by_us(architecture: str, layout: ParallelLayout) -> bool:
    """Whether a rank reads all of the model and leaves its part of it; else transformers' plan says which it reads."""
    return architecture in _CUT_BY_US and not layout.is_expert_parallel


def _cut_part(
    folder: Path,
    model_config: PretrainedConfig,
    architecture: str,
    config: EngineConfig,
    device: torch.device,
    groups: RankGroups,
    max_model_len: int | None,
) -> ReadModel:
    check_layout(model_config, groups.layout, architecture)
    # A device need not have room for the whole of it. Random weights are drawn where they are quick to draw, by all
    # ranks alike.
    torch.manual_seed(config.seed)
    where = torch.device("cpu") if config.needs_weights else device
    module = read_module(folder, model_config, architecture, config, where)
    num_parameters = _num_parameters(module)
    truth = plan = None
    if max_model_len is not None:
        ask: Callable[[], Truth] = (
            (lambda: find_truth(module, architecture, model_config.vocab_size))
            if groups.rank == 0
            else (lambda: Truth.elsewhere(module, model_config.vocab_size))
        )
        truth = ask().to(device, groups.of_rank_zero)
        plan = plan_of_part(read_decoder(module, max_model_len, device), groups.layout, groups.rank)
    cut_decoder(module, groups)
    torch.nn.Module.to(module, device)
    modes = ("lean",) if groups.layout.pipeline > 1 else ("lean", "packed")
    return ReadModel(module, truth, modes, num_parameters, plan)


def _planned_part(
    folder: Path,
    model_config: PretrainedConfig,
    architecture: str,
    config: EngineConfig,
    device: torch.device,
    groups: RankGroups,
    max_model_len: int | None,
) -> ReadModel:
    layout = groups.layout
    options = planned_options(model_config.get_text_config(), layout, architecture, device)
    told = f"{_option(layout)}, but {architecture} is shared by transformers' own plan, which"
    if declared_quantization(folder) is not None:
        raise ConfigurationError(f"{told} reads no quantised files; use files in 16 bits, or one rank")
    if config.quantization is not None:
        raise ConfigurationError(
            f"{told} keeps linear layers as they are, and quantization is {config.quantization!r}; leave it out"
        )
    if not config.needs_weights:
        raise ConfigurationError(f"{told} reads files, and load_format is 'dummy'; use load_format 'auto'")
    if config.enable_prompt_embeds:
        # Rank 0 alone embeds tokens beside what is given, and would wait for the others.
        raise ConfigurationError(f"{told} shares the embeddings, too; leave enable_prompt_embeds out, or use one rank")
    with chosen_device(device):
        module = read_module(folder, model_config, architecture, config, device, **options)
    num_parameters = _num_parameters(module)
    truth = None
    if max_model_len is not None:
        # By all ranks together, each with its part: none has the model whole.
        try:
            truth = find_truth(module, architecture, model_config.get_text_config().vocab_size)
        except ModelLoadError as error:
            raise ModelLoadError(f"{_option(layout)}, and by transformers' plan {error}; use one rank") from error
        truth = truth.to(device, groups.of_rank_zero)
    return ReadModel(module, truth, ("packed",), num_parameters)


def _check_kind(
    folder: Path, model_config: PretrainedConfig, architecture: str, config: EngineConfig, layout: ParallelLayout
) -> None:
    """Raises ``ConfigurationError`` for what no several ranks compute."""
    told = ""
    if pools(folder, model_config, config.runner):
        told = "a model that pools is computed by one rank"
    elif is_seeing_type(model_config):
        told = "a model that reads images is computed by one rank"
    elif config.enable_lora:
        told = "adapters are computed by one rank; leave enable_lora out"
    if told:
        raise ConfigurationError(
            f"{_option(layout)}, but {told} ({architecture}): use tensor_parallel_size 1 and pipeline_parallel_size 1, "
            f"and more engines"
        )


@contextmanager
def naming_ranks(groups: RankGroups | None) -> Iterator[None]:
    """Say of what cannot be computed that it is by several ranks, where it is."""
    try:
        yield
    except ModelLoadError as error:
        if groups is None:
            raise
        raise ModelLoadError(
            f"{_option(groups.layout)}, and ranks compute models in the modes lean and packed alone: {error}; use "
            f"tensor_parallel_size 1 and pipeline_parallel_size 1, which has other modes"
        ) from error


def _option(layout: ParallelLayout) -> str:
    if layout.tensor == 1:
        return f"pipeline_parallel_size is {layout.pipeline}"
    return f"tensor_parallel_size is {layout.tensor}"


def _num_parameters(module: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
