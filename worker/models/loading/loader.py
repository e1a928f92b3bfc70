"""Load a transformers model, and choose the mode and the attention kernel that compute it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ....kernels.dispatch import AUTO
from ....kernels.paged_attention import backend_of
from ....shared.errors import ConfigurationError
from ...config.engine_config import EngineConfig
from ..attention.call import AttentionCall
from ..checkpoint.load import check_finite
from ..checkpoint.model_config import eos_token_ids, max_model_len, read_config
from ..checkpoint.tokenizer_folder import tokenizer_folder
from ..checks.row_independence import is_row_independent
from ..forward import Forward, ForwardSettings
from ..images.vision_model import image_refusal_of_forward
from ..lean.native import NativeForward
from ..loaded import LoadedModel
from ..parallel.groups import RankGroups
from ..placing.device import device_of
from ..pooling.compiled_encoder import compile_encoder, plan_of
from ..pooling.encoder import EncoderForward, EncoderReference, encoder_forward, is_bidirectional
from ..pooling.folder import PoolingFolder, pools
from ..pooling.loading import as_decoder, make_pooling
from ..shared_experts.ranks import ExpertRanks
from ..shared_experts.share import share_and_check, share_experts
from .candidates import choose_forward
from .preparing import described, pack, prepare, prepared_tolerance
from .rank_checks import naming_ranks
from .reading import ReadModel, read_model, read_module

log = structlog.get_logger(__name__)

# What attends where no kernel of ours does.
OWN_CODE = "transformers"


def check_attention_backend(forward: Forward, wanted: str, architecture: str, *, is_batch_invariant: bool) -> str:
    """Verify that ``wanted`` attends, and not something else in its place; return the name of what does.

    Raises:
        ConfigurationError: it cannot; says what would.
    """
    found = _attention_backend_of(forward, wanted, is_batch_invariant=is_batch_invariant)
    return check_backend(found, wanted, architecture)


def check_backend(found: str, wanted: str, architecture: str) -> str:
    """Verify that what attends is ``wanted``; return ``found``.

    Raises: as ``check_attention_backend``.
    """
    if wanted not in (AUTO, found):
        raise ConfigurationError(
            f"attention_backend is {wanted!r}, but the attention of {architecture} is computed by {found} here; "
            "use attention_backend 'auto'"
        )
    return found


def _attention_backend_of(forward: Forward, wanted: str, *, is_batch_invariant: bool) -> str:
    """Return the name of what attends: one of ``kernels.dispatch.BACKENDS``, several with " + ", or ``OWN_CODE``."""
    if isinstance(forward, NativeForward):
        return "native"
    if not forward.attention_calls:
        return OWN_CODE
    device = next(forward.network.parameters()).device

    def of_call(call: AttentionCall) -> str:
        if call.has_own_rule:
            return "reference"  # the rule is a Python callable, and no kernel can call it
        dims = call.key_shape[1], call.value_shape[1]
        dtypes = call.dtype, call.cache_format.dtype
        return backend_of(device, *dtypes, dims, backend=wanted, is_batch_invariant=is_batch_invariant)

    return " + ".join(dict.fromkeys(map(of_call, forward.attention_calls)))


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
    vision, refusal = read.vision, read.image_refusal
    ending = eos_token_ids(module, vocab_size)
    with naming_ranks(groups):
        forward = _choose_forward(module, architecture, vocab_size, longest, config, read, groups)
    if vision is not None and (why := image_refusal_of_forward(vision, forward, config)):
        log.warning("images_refused", architecture=architecture, reason=why)
        vision, refusal = None, f"this engine reads no images: {why}"
    backend = _attention_backend(forward, config, architecture)
    return LoadedModel(
        forward=forward,
        folder=tokenizer_folder(folder, config.trust_remote_code),
        max_model_len=longest,
        eos_token_ids=ending,
        attention_backend=backend,
        vision=vision,
        image_refusal=refusal,
        groups=groups,
        is_row_independent=is_row_independent(forward, backend),
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
    truth, device = EncoderReference(module, vocab_size), device_of(config)
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
    for part in (module, *((read.encoder.module,) if read.encoder else ())):
        check_finite(part, model.architecture)
    if model.expert_ranks is not None:
        share_experts(module, model.expert_ranks, model.architecture)
    if pools(folder, model_config, config.runner) and not isinstance(model.forward, EncoderForward):
        module = as_decoder(module, type(module).__name__)
    network = model.forward.network_of(module)
    pack(network, config, device_of(config))
    return network if model.vision is None or read.encoder is None else nn.ModuleList([network, read.encoder.module])
