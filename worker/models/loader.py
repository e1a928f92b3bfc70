"""Loads a transformers model and finds the way in which it can be computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ..config.engine_config import EngineConfig
from .adapters.slots import AdapterSlots
from .cache.page_layout import PageLayout
from .checkpoint.load import check_finite
from .checkpoint.model_config import eos_token_ids, max_model_len, read_config
from .checks.lone_tokens import computes_lone_tokens_otherwise
from .checks.rows_alone import computes_rows_alone
from .device import device_of
from .forward import Forward, ForwardSettings
from .images.seeing import SeeingModel, refusal_of_forward
from .own_module import read_module
from .parallel.groups import RankGroups
from .pooling.compiled_encoder import compile_encoder, plan_of
from .pooling.encoder import EncoderForward, EncoderTruth, encoder_forward, is_bidirectional
from .pooling.folder import PoolingFolder, pools
from .pooling.loading import as_decoder, make_pooling
from .pooling.pooler import PoolingModel
from .preparing import described, pack, prepare, prepared_tolerance
from .rank_checks import naming_ranks
from .reading import ReadModel, read_model
from .shared_experts.ranks import ExpertRanks
from .shared_experts.share import share_and_check, share_experts
from .tokenizer_folder import tokenizer_folder
from .ways.attention_backend import check_attention_backend, check_backend
from .ways.candidates import choose_forward

log = structlog.get_logger(__name__)


@dataclass
class LoadedModel:
    """A model and the way in which it is computed.

    Args:
        folder: where ``tokenizer.json`` is.
        max_model_len: what was asked for, else the model's own limit.
        is_length_chosen: ``max_model_len`` was asked for, and may not be lowered.
        vocab_size: every valid token id is below it.
        num_parameters: shared ones counted once.
        attention_backend: what attends; see ``attention_backend.py``.
        pooling: what is made of hidden states, which ``forward`` then returns in place of logits; None of a model that
            generates.
        adapters: where adapters are computed with; None where none are served.
        seeing: what makes features of images, which stand in the place of tokens; None of a model that takes none.
        image_refusal: why it takes none.
        quantization: of its linear layers, chosen at the start; None where they are in the dtype.
        weight_conversions: how transformers named and fused what the files have, for the way back.
        groups: the ranks that compute it together; None of a model that one does.
        expert_ranks: who has the other experts; None of a model that has all.
        num_experts: of a layer, at all ranks together; 0 where they are not shared.
        computes_rows_alone: nothing in the way that it is computed lets bits of a token depend on the others.
        pages: how its layers share the KV cache, where some look at the last tokens alone; None for one table of all.
    """

    forward: Forward
    folder: Path
    architecture: str
    max_model_len: int
    is_length_chosen: bool
    vocab_size: int
    eos_token_ids: list[int]
    num_parameters: int
    attention_backend: str
    pooling: PoolingModel | None = None
    adapters: AdapterSlots | None = None
    seeing: SeeingModel | None = None
    image_refusal: str = ""
    quantization: str | None = None
    weight_conversions: Any = None
    groups: RankGroups | None = None
    expert_ranks: ExpertRanks | None = None
    num_experts: int = 0
    computes_rows_alone: bool = False
    pages: PageLayout | None = None

    @property
    def computes_lone_tokens_otherwise(self) -> bool:
        """Whether the result of a token depends on whether it is the only one of its request in a forward."""
        return computes_lone_tokens_otherwise(self.forward)

    @property
    def network(self) -> nn.Module:
        """What computes, and holds the weights."""
        return self.forward.network

    @property
    def enough_tokens(self) -> int | None:
        """Of a step of an encoder: more are computed no sooner for it. None where a step may have as many as fit."""
        return self.forward.enough_tokens if isinstance(self.forward, EncoderForward) else None

    @property
    def weights(self) -> nn.Module:
        """All modules that hold weights: ``network``, and the tower of a model that sees."""
        return self.network if self.seeing is None else nn.ModuleList([self.network, self.seeing.tower.module])

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.network.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(self.network.parameters()).device


def load_model(
    config: EngineConfig,
    folder: Path,
    groups: RankGroups | None = None,
    *,
    expert_ranks: ExpertRanks | None = None,
) -> LoadedModel:
    """Load the model in ``folder`` onto the device of ``config``.

    Args:
        groups: the ranks that compute it together, each of which calls this at the same time and gets its part; None
            for all of it.
        expert_ranks: with whom its experts are shared. All ranks load at the same time, and compute to try it out.

    Raises:
        ModelLoadError: a file, the architecture or its attention is not what we can run; says which.
        ConfigurationError: the device or ``max_model_len`` does not fit.
    """
    device = device_of(config)
    transformers_logging.disable_progress_bar()
    model_config = read_config(folder, config)
    architecture = (model_config.architectures or [model_config.model_type])[0]
    longest = max_model_len(model_config.get_text_config(), config.max_model_len)
    vocab_size = model_config.get_text_config().vocab_size
    read = read_model(folder, model_config, architecture, config, device, groups, longest)
    module = read.module
    common = {
        "architecture": architecture,
        "is_length_chosen": config.max_model_len is not None,
        "vocab_size": vocab_size,
        "num_parameters": read.num_parameters,
        "quantization": config.quantization,
        "weight_conversions": read.weight_conversions,
        "expert_ranks": expert_ranks,
        "num_experts": 0 if expert_ranks is None else share_and_check(module, expert_ranks, architecture),
    }
    if pools(folder, model_config, config.runner):
        return _load_pooling(module, folder, config, longest, common)
    seeing, refusal = read.seeing, read.image_refusal
    ending = eos_token_ids(module, vocab_size)
    with naming_ranks(groups):
        forward = _choose_forward(module, architecture, vocab_size, longest, config, read, groups)
    if seeing is not None and (why := refusal_of_forward(seeing, forward, config)):
        log.warning("images_refused", architecture=architecture, reason=why)
        seeing, refusal = None, f"this engine reads no images: {why}"
    backend = _attention_backend(forward, config, architecture)
    return LoadedModel(
        forward=forward,
        folder=tokenizer_folder(folder, config.trust_remote_code),
        max_model_len=longest,
        eos_token_ids=ending,
        attention_backend=backend,
        seeing=seeing,
        image_refusal=refusal,
        groups=groups,
        computes_rows_alone=computes_rows_alone(forward, backend),
        **common,
    )


def _load_pooling(
    module: PreTrainedModel, folder: Path, config: EngineConfig, longest: int, common: dict[str, Any]
) -> LoadedModel:
    """``load_model`` of one that pools."""
    architecture, vocab_size, found = common["architecture"], common["vocab_size"], PoolingFolder.read(folder)
    if found.max_length is not None and config.max_model_len is None:
        longest = min(longest, found.max_length)
    with torch.inference_mode():
        is_encoder = is_bidirectional(module, vocab_size)
        pooling = make_pooling(module, found, architecture, is_encoder=is_encoder)
        if is_encoder:
            forward = _encoder_forward(module, architecture, vocab_size, config)
            longest = min(longest, forward.max_text_len or longest)
            # transformers' own attention is the reference of an encoder.
            wanted = "auto" if config.attention_backend == "reference" else config.attention_backend
            backend = check_backend(forward.attention_backend, wanted, architecture)
        else:
            causal = as_decoder(module, architecture)
            forward = _choose_forward(causal, architecture, vocab_size, longest, config)
            backend = _attention_backend(forward, config, architecture)
    return LoadedModel(
        forward=forward,
        folder=tokenizer_folder(folder, config.trust_remote_code),
        max_model_len=longest,
        eos_token_ids=[],
        attention_backend=backend,
        pooling=pooling,
        **common,
    )


def _encoder_forward(
    module: PreTrainedModel, architecture: str, vocab_size: int, config: EngineConfig
) -> EncoderForward:
    truth, device = EncoderTruth(module, vocab_size), device_of(config)
    forward, plan = encoder_forward(module, architecture, truth), None
    if device.type == "cpu" and config.attention_backend in ("auto", "native"):
        plan = plan_of(forward, architecture, config.quantization)
    pack(module, config, device)
    if plan is not None:
        forward = compile_encoder(forward, plan, truth, prepared_tolerance(config), architecture)
    truth.check(forward, prepared_tolerance(config), f"{architecture} with {described(config)}")
    return forward


def _choose_forward(
    module: PreTrainedModel,
    architecture: str,
    vocab_size: int,
    longest: int,
    config: EngineConfig,
    read: ReadModel | None = None,
    groups: RankGroups | None = None,
) -> Forward:
    """``read``: of which ``module`` is; None where ``module`` is whole."""
    return choose_forward(
        module,
        architecture,
        vocab_size,
        ForwardSettings(longest, config.deterministic, config.attention_backend, groups, read.plan if read else None),
        partial(prepare, config=config, device=device_of(config), vocab_size=vocab_size, max_model_len=longest),
        prepared_tolerance(config),
        described(config),
        **({"truth": read.truth, "modes": read.modes, "is_whole": read.is_whole} if read else {}),
    )


def _attention_backend(forward: Forward, config: EngineConfig, architecture: str) -> str:
    return check_attention_backend(
        forward, config.attention_backend, architecture, is_batch_invariant=config.deterministic
    )


def load_module(config: EngineConfig, folder: Path) -> PreTrainedModel:
    """Load transformers' own module of the model, as it is before anything of ours is done to it.

    Raises: as ``load_model``.
    """
    model_config = read_config(folder, config)
    architecture = (model_config.architectures or [model_config.model_type])[0]
    return read_module(folder, model_config, architecture, config, device_of(config))


def load_weights(config: EngineConfig, folder: Path, model: LoadedModel) -> nn.Module:
    """Load ``model.weights``, of a model of ``load_model``, once more.

    The files may have been written anew since, and nothing is computed to try them, so every weight is looked at.

    Raises: as ``load_model``.
    """
    model_config = read_config(folder, config)
    architecture = (model_config.architectures or [model_config.model_type])[0]
    read = read_model(folder, model_config, architecture, config, device_of(config), model.groups)
    module = read.module
    for part in (module, *((read.tower.module,) if read.tower else ())):
        check_finite(part, model.architecture)
    if model.expert_ranks is not None:
        share_experts(module, model.expert_ranks, model.architecture)
    if pools(folder, model_config, config.runner) and not isinstance(model.forward, EncoderForward):
        module = as_decoder(module, type(module).__name__)
    network = model.forward.network_of(module)
    pack(network, config, device_of(config))
    return network if model.seeing is None or read.tower is None else nn.ModuleList([network, read.tower.module])
