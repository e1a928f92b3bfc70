"""Read a model as a module of transformers: the whole model, or one rank's part of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from ....shared.errors import ConfigurationError, ModelLoadError
from ...config.engine_config import EngineConfig
from ..checkpoint.load import load_checkpoint
from ..checkpoint.wording import first_line
from ..checks.conformance import ReferenceRun
from ..formats.declared import declared_quantization
from ..images.model_parts import VisionEncoder, split_vision_encoder, text_module
from ..images.vision_model import (
    SplitModel,
    VisionModel,
    check_served,
    image_refusal_of,
    is_vision_type,
    needs_vision_inputs,
    split_model,
    split_text_decoder,
)
from ..lean.reading.decoder import read_decoder
from ..parallel.cut import check_layout, cut_decoder, plan_of_part
from ..parallel.groups import RankGroups
from ..parallel.planned import chosen_device, planned_options
from ..parallel.shares import ModelShares, linear_sizes, shares_of
from ..placing.device import return_free_memory
from ..placing.moving import move_module
from ..plan import DecoderPlan
from ..pooling.folder import pools
from ..pooling.loading import load_pooling_module
from .candidates import MODES, run_reference
from .rank_checks import check_kind, describe_layout, is_cut_by_us


def read_module(
    folder: Path,
    model_config: PretrainedConfig,
    architecture: str,
    config: EngineConfig,
    device: torch.device,
    **options: Any,
) -> PreTrainedModel:
    """Load transformers' own module of ``model_config`` onto ``device``, from ``folder`` or with random weights.

    Args:
        options: of ``from_pretrained``.

    Raises:
        ModelLoadError: a file or the architecture is not supported; the message says which.
    """
    check_served(model_config, architecture)
    if not config.needs_weights:
        return _random_module(model_config, architecture, config, device)
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    load = load_pooling_module if pools(folder, model_config, config.runner) else _load_generating
    module = load(
        folder, model_config, architecture, dtype=dtype, trust_remote_code=config.trust_remote_code, **options
    )
    # The allocator would keep the memory in which quantised weights were unpacked.
    return_free_memory()
    move_module(module, device)
    return module.eval()


def _load_generating(
    folder: Path, model_config: PretrainedConfig, architecture: str, **options: Any
) -> PreTrainedModel:
    return load_checkpoint(folder, model_config, architecture, auto_class=_auto_class(model_config), **options)


def _auto_class(model_config: PretrainedConfig) -> Any:
    return AutoModelForImageTextToText if is_vision_type(model_config) else AutoModelForCausalLM


def _random_module(
    model_config: PretrainedConfig, architecture: str, config: EngineConfig, device: torch.device
) -> PreTrainedModel:
    """Create a model with random weights on its device, where 8B parameters take seconds on a GPU, but minutes on a
    host.
    """
    dtype = getattr(torch, config.dtype) if config.dtype != "auto" else model_config.dtype or torch.float32
    try:
        with device:
            module = _auto_class(model_config).from_config(
                model_config, dtype=dtype, trust_remote_code=config.trust_remote_code, attn_implementation="eager"
            )
    except Exception as error:  # any exception of the architecture's own code
        raise ModelLoadError(f"{architecture} cannot be made from its config: {first_line(error)}") from error
    return module.eval()


@dataclass
class ReadModel:
    """A model that was read, before a forward is chosen.

    Args:
        module: the text decoder, on its device. With several ranks it has this rank's part, and logits are whole at
            rank 0.
        reference: results of the whole model; None if ``module`` can still compute them.
        modes: in which it may be computed.
        is_whole: ``module`` computes the whole model, if necessary together with other ranks.
        num_parameters: of the whole model.
        weight_conversions: transformers' renaming and fusing of the tensors of the files, to undo it when weights are
            saved.
        plan: lean plan of the rank's part; None if it can be read from ``module``.
        vision: verified vision model, at the first of several ranks; None if the model takes no images.
        image_refusal: why it takes none.
        encoder: vision encoder, verified or not.
        shares: the rank's parts of linear layers; None for whole layers, or parts by transformers' plan.
    """

    module: PreTrainedModel
    reference: ReferenceRun | None
    modes: Collection[str]
    num_parameters: int
    weight_conversions: Any = None
    plan: DecoderPlan | None = None
    vision: VisionModel | None = None
    image_refusal: str = ""
    encoder: VisionEncoder | None = None
    is_whole: bool = True
    shares: ModelShares | None = None


def read_model(
    folder: Path,
    model_config: PretrainedConfig,
    architecture: str,
    config: EngineConfig,
    device: torch.device,
    groups: RankGroups | None,
    max_model_len: int | None = None,
) -> ReadModel:
    """Read the model in ``folder``. Several ranks do so at the same time, and each gets its part.

    Args:
        max_model_len: of the longest request; None to read only weights, without the reference for checks.

    Raises:
        ModelLoadError: as ``read_module``.
        ConfigurationError: ranks cannot share the model; names the option and the remedy.
    """
    if groups is None:
        module = read_module(folder, model_config, architecture, config, device)
        return _whole(module, folder, model_config, config, groups, is_tried=max_model_len is not None)
    check_kind(folder, model_config, architecture, config, groups.layout)
    read = _cut_part if is_cut_by_us(model_config, architecture, groups.layout) else _planned_part
    part = read(folder, model_config, architecture, config, device, groups, max_model_len)
    # Memory of the parts that were read and belong to other ranks.
    return_free_memory()
    return part


def _whole(
    module: PreTrainedModel,
    folder: Path,
    model_config: PretrainedConfig,
    config: EngineConfig,
    groups: RankGroups | None,
    *,
    is_tried: bool,
) -> ReadModel:
    """Return ``module``, a whole model, with its text decoder and vision encoder separated. Raises as
    ``split_model``.
    """
    num_parameters = _num_parameters(module)
    split = _split(module, folder, model_config, config, groups, is_tried=is_tried)
    return ReadModel(
        split.text,
        None,
        MODES,
        num_parameters,
        getattr(module, "_weight_conversions", None),
        vision=split.vision,
        image_refusal=split.refusal,
        encoder=split.encoder,
    )


def _split(
    module: PreTrainedModel,
    folder: Path,
    model_config: PretrainedConfig,
    config: EngineConfig,
    groups: RankGroups | None,
    *,
    is_tried: bool,
) -> SplitModel:
    if not is_vision_type(model_config) or pools(folder, model_config, config.runner):
        return SplitModel(module, None, image_refusal_of(model_config), None)
    if not is_tried:
        return SplitModel(text_module(module), None, "", split_vision_encoder(module))
    vocab_size = model_config.get_text_config().vocab_size
    if groups is not None and groups.rank > 0:
        return SplitModel(split_text_decoder(module, vocab_size), None, "", None)
    return split_model(
        module,
        folder,
        vocab_size,
        wants_images=config.max_images > 0,
        trust_remote_code=config.trust_remote_code,
    )


def _cut_part(
    folder: Path,
    model_config: PretrainedConfig,
    architecture: str,
    config: EngineConfig,
    device: torch.device,
    groups: RankGroups,
    max_model_len: int | None,
) -> ReadModel:
    text_config = model_config.get_text_config()
    check_layout(text_config, groups.layout, architecture)
    # A device may be too small for the whole model. Random weights are drawn where this is fast, equally by all ranks.
    torch.manual_seed(config.seed)
    where = torch.device("cpu") if config.needs_weights else device
    module = read_module(folder, model_config, architecture, config, where)
    read = _whole(module, folder, model_config, config, groups, is_tried=max_model_len is not None)
    text = read.module
    if groups.layout.pipeline > 1:
        read.modes = ("lean",)
    else:
        read.modes = ("packed",) if needs_vision_inputs(model_config) else ("lean", "packed")
    if max_model_len is not None:
        make_reference: Callable[[], ReferenceRun] = (
            (lambda: run_reference(text, architecture, text_config.vocab_size))
            if groups.rank == 0
            else (lambda: ReferenceRun.elsewhere(text, text_config.vocab_size))
        )
        read.reference = make_reference().to(device, groups.of_rank_zero)
        if "lean" in read.modes:
            read.plan = plan_of_part(read_decoder(text, max_model_len, device), groups.layout, groups.rank)
    read.is_whole = False
    sizes = linear_sizes(text)
    cut_decoder(text, groups)
    read.shares = shares_of(sizes, text, groups)
    for part in (text, *((read.encoder.module,) if read.encoder else ())):
        move_module(part, device)
    return read


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
    fact = (
        f"enable_expert_parallel is set, and {architecture} is then"
        if layout.is_expert_parallel
        else f"{describe_layout(layout)}, but {architecture} is"
    )
    fact += " shared by transformers' own plan, which"
    if declared_quantization(folder) is not None:
        raise ConfigurationError(f"{fact} reads no quantised files; use files in 16 bits, or one rank")
    if config.quantization is not None:
        raise ConfigurationError(
            f"{fact} keeps linear layers as they are, and quantization is {config.quantization!r}; leave it out"
        )
    if not config.needs_weights:
        raise ConfigurationError(f"{fact} reads files, and load_format is 'dummy'; use load_format 'auto'")
    if config.enable_lora:
        raise ConfigurationError(f"{fact} changes linear layers; leave enable_lora out, or use one rank")
    if config.enable_prompt_embeds:
        # Only rank 0 embeds tokens in addition to passed embeddings, and would wait for the others.
        raise ConfigurationError(f"{fact} shares the embeddings, too; leave enable_prompt_embeds out, or use one rank")
    with chosen_device(device):
        module = read_module(folder, model_config, architecture, config, device, **options)
    reference = None
    if max_model_len is not None:
        # Computed by all ranks together, since none has the whole model.
        try:
            reference = run_reference(module, architecture, model_config.get_text_config().vocab_size)
        except ModelLoadError as error:
            raise ModelLoadError(
                f"{describe_layout(layout)}, and by transformers' plan {error}; use one rank"
            ) from error
        reference = reference.to(device, groups.of_rank_zero)
    return ReadModel(
        module,
        reference,
        ("packed",),
        _num_parameters(module),
        getattr(module, "_weight_conversions", None),
        image_refusal=image_refusal_of(model_config),
    )


def _num_parameters(module: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
