"""Load a transformers model, and choose the mode and the attention kernel that compute it."""

from __future__ import annotations

from collections.abc import Callable
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
from ..checks.references import References
from ..checks.row_independence import is_row_independent
from ..forward import Forward, ForwardSettings
from ..images.vision_model import image_refusal_of_forward
from ..lean.native import NativeForward
from ..lean.staged import computing_layers
from ..loaded import LoadedModel
from ..parallel.groups import RankGroups
from ..placing.device import device_of, return_free_memory
from ..pooling.compiled_encoder import compile_encoder, plan_of
from ..pooling.encoder import EncoderForward, EncoderReference, encoder_forward, is_bidirectional
from ..pooling.folder import PoolingFolder, pools
from ..pooling.loading import as_decoder, make_pooling
from ..shared_experts import ExpertRanks, share_and_check, share_experts
from .calibration import TextEncoder, calibration_prompts, do_not_report
from .candidates import choose_forward
from .preparing import describe_preparation, pack, prepare, prepared_tolerance, weight_format
from .rank_checks import explaining_ranks
from .reading import ReadModel, read_model, read_module
from .stored import store_model
from .text_check import check_prompt

log = structlog.get_logger(__name__)

# Name of the backend if the model attends by its own code.
OWN_CODE = "transformers"


def check_attention_backend(forward: Forward, requested: str, architecture: str, *, is_batch_invariant: bool) -> str:
    """Verify that ``requested`` computes the attention; return the name of the backend that does.

    Raises:
        ConfigurationError: it does not; the message names the backend that does.
    """
    actual = _attention_backend_of(forward, requested, is_batch_invariant=is_batch_invariant)
    return check_backend(actual, requested, architecture)


def check_backend(actual: str, requested: str, architecture: str) -> str:
    """Verify that ``actual`` is the ``requested`` backend; return it.

    Raises: as ``check_attention_backend``.
    """
    if requested not in (AUTO, actual):
        raise ConfigurationError(
            f"attention_backend is {requested!r}, but the attention of {architecture} is computed by {actual} here; "
            "use attention_backend 'auto'"
        )
    return actual


def _attention_backend_of(forward: Forward, requested: str, *, is_batch_invariant: bool) -> str:
    """Return the name of the backend: one of ``kernels.dispatch.BACKENDS``, several with " + ", or ``OWN_CODE``."""
    if isinstance(computing_layers(forward), NativeForward):
        return "native"
    if not forward.attention_calls:
        return OWN_CODE
    device = next(forward.network.parameters()).device

    def of_call(call: AttentionCall) -> str:
        if call.has_own_rule:
            return "reference"  # the rule is a Python callable, which no kernel can call
        dims = call.key_shape[1], call.value_shape[1]
        dtypes = call.dtype, call.cache_format.dtype
        return backend_of(device, *dtypes, dims, backend=requested, is_batch_invariant=is_batch_invariant)

    return " + ".join(dict.fromkeys(map(of_call, forward.attention_calls)))


def load_model(
    config: EngineConfig,
    folder: Path,
    groups: RankGroups | None = None,
    *,
    expert_ranks: ExpertRanks | None = None,
    report: Callable[[], None] = do_not_report,
) -> LoadedModel:
    """Load the model in ``folder`` onto the device of ``config``.

    Args:
        groups: the ranks that compute it together. Each calls this at the same time and gets its part. None for one
            rank.
        expert_ranks: the ranks that share its experts. All load at the same time, and compute together to try it out.
        report: called after each layer whose packing takes long.

    Raises:
        ModelLoadError: a file, the architecture or its attention is not supported; the message says which.
        ConfigurationError: the device or ``max_model_len`` does not fit.
    """
    device = device_of(config)
    transformers_logging.disable_progress_bar()
    model_config = read_config(folder, config)
    architecture = (model_config.architectures or [model_config.model_type])[0]
    longest = max_model_len(model_config.get_text_config(), config.max_model_len)
    vocab_size = model_config.get_text_config().vocab_size
    read = read_model(folder, model_config, architecture, config, device, groups, longest)
    common = {
        "architecture": architecture,
        "is_length_chosen": config.max_model_len is not None,
        "vocab_size": vocab_size,
        "num_parameters": read.num_parameters,
        "weight_conversions": read.weight_conversions,
        "expert_ranks": expert_ranks,
        "num_experts": 0 if expert_ranks is None else share_and_check(read.module, expert_ranks, architecture),
    }
    if pools(folder, model_config, config.runner):
        model = _load_pooling(read.module, folder, config, longest, common, report)
    else:
        model = _load_generating(read, folder, config, longest, groups, common, report)
    # What the checks computed is freed by now, and so are weights that were packed.
    del read
    return_free_memory()
    return model


def _load_generating(
    read: ReadModel,
    folder: Path,
    config: EngineConfig,
    longest: int,
    groups: RankGroups | None,
    common: dict[str, Any],
    report: Callable[[], None],
) -> LoadedModel:
    """Load a model that generates, as ``load_model``, and store its structure for the next load."""
    architecture, vocab_size = common["architecture"], common["vocab_size"]
    vision, refusal = read.vision, read.image_refusal
    eos_ids = eos_token_ids(read.module, vocab_size)
    with explaining_ranks(groups):
        forward, references = _choose_forward(
            read.module, architecture, vocab_size, longest, config, folder, read, groups, report
        )
    if vision is not None and (reason := image_refusal_of_forward(vision, forward, config)):
        log.warning("images_refused", architecture=architecture, reason=reason)
        vision, refusal = None, f"this engine reads no images: {reason}"
    backend = _attention_backend(forward, config, architecture)
    model = LoadedModel(
        forward=forward,
        folder=tokenizer_folder(folder, config.trust_remote_code),
        max_model_len=longest,
        eos_token_ids=eos_ids,
        attention_backend=backend,
        vision=vision,
        image_refusal=refusal,
        quantization=weight_format(config, folder, forward.network),
        groups=groups,
        shares=read.shares,
        is_row_independent=is_row_independent(forward, backend),
        **common,
    )
    store_model(config, folder, model, references)
    return model


def _load_pooling(
    module: PreTrainedModel,
    folder: Path,
    config: EngineConfig,
    longest: int,
    common: dict[str, Any],
    report: Callable[[], None],
) -> LoadedModel:
    """Load a model that pools, as ``load_model``."""
    architecture, vocab_size, settings = common["architecture"], common["vocab_size"], PoolingFolder.read(folder)
    if settings.max_length is not None and config.max_model_len is None:
        longest = min(longest, settings.max_length)
    with torch.inference_mode():
        is_encoder = is_bidirectional(module, vocab_size)
        pooling = make_pooling(module, settings, architecture, is_encoder=is_encoder)
        if is_encoder:
            forward = _encoder_forward(module, architecture, vocab_size, config)
            longest = min(longest, forward.max_text_len or longest)
            # For an encoder, transformers' own attention is the reference.
            requested = "auto" if config.attention_backend == "reference" else config.attention_backend
            backend = check_backend(forward.attention_backend, requested, architecture)
        else:
            causal = as_decoder(module, architecture)
            forward, _ = _choose_forward(causal, architecture, vocab_size, longest, config, folder, report=report)
            backend = _attention_backend(forward, config, architecture)
    return LoadedModel(
        forward=forward,
        folder=tokenizer_folder(folder, config.trust_remote_code),
        max_model_len=longest,
        eos_token_ids=[],
        attention_backend=backend,
        pooling=pooling,
        quantization=weight_format(config, folder, forward.network),
        **common,
    )


def _encoder_forward(
    module: PreTrainedModel, architecture: str, vocab_size: int, config: EngineConfig
) -> EncoderForward:
    reference, device = EncoderReference(module, vocab_size), device_of(config)
    forward, plan = encoder_forward(module, architecture, reference), None
    if device.type == "cpu" and config.attention_backend in ("auto", "native"):
        plan = plan_of(forward, architecture, config.quantization)
    pack(module, config, device)
    tolerance = prepared_tolerance(config, module)
    if plan is not None:
        forward = compile_encoder(forward, plan, reference, tolerance, architecture)
    reference.check(forward, tolerance, f"{architecture} with {describe_preparation(config, module)}")
    return forward


def _choose_forward(
    module: PreTrainedModel,
    architecture: str,
    vocab_size: int,
    longest: int,
    config: EngineConfig,
    folder: Path,
    read: ReadModel | None = None,
    groups: RankGroups | None = None,
    report: Callable[[], None] = do_not_report,
) -> tuple[Forward, References]:
    """Choose the forward of ``module``; return it with the results that it was compared with.

    Args:
        read: the result that contains ``module``; None if ``module`` is a whole model.
        report: called after each layer whose packing takes long.
    """
    prompts, text = _prompts_of(TextEncoder(folder, config, vocab_size), config, longest, is_checked=read is not None)
    return choose_forward(
        module,
        architecture,
        vocab_size,
        ForwardSettings(longest, config.deterministic, config.attention_backend, groups, read.plan if read else None),
        partial(
            prepare,
            config=config,
            device=device_of(config),
            vocab_size=vocab_size,
            max_model_len=longest,
            prompts=prompts,
            report=report,
            text=text,
        ),
        partial(prepared_tolerance, config),
        partial(describe_preparation, config),
        **({"reference": read.reference, "modes": read.modes, "is_whole": read.is_whole} if read else {}),
    )


def _prompts_of(
    encoder: TextEncoder, config: EngineConfig, longest: int, *, is_checked: bool
) -> tuple[list[list[int]], list[int]]:
    """Return the prompts by which weights are packed, and the one by which they are checked."""
    prompts = calibration_prompts(encoder, config, longest)
    return prompts, check_prompt(encoder, config, longest) if is_checked else []


def _attention_backend(forward: Forward, config: EngineConfig, architecture: str) -> str:
    return check_attention_backend(
        forward, config.attention_backend, architecture, is_batch_invariant=config.deterministic
    )


def load_module(config: EngineConfig, folder: Path) -> PreTrainedModel:
    """Load transformers' own module of the model, unchanged.

    Raises: as ``load_model``.
    """
    model_config = read_config(folder, config)
    architecture = (model_config.architectures or [model_config.model_type])[0]
    return read_module(folder, model_config, architecture, config, device_of(config))


def load_weights(
    config: EngineConfig, folder: Path, model: LoadedModel, report: Callable[[], None] = do_not_report
) -> nn.Module:
    """Load ``model.weights`` again, for a model of ``load_model``.

    The files may have been rewritten since, and no trial is run, so every weight is checked to be finite.

    Args:
        report: called after each layer whose packing takes long.

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
    if config.has_four_bit_weights and not isinstance(model.forward, EncoderForward):
        # Examples of a layer's inputs need a forward, so one is chosen again.
        chosen, _ = _choose_forward(
            module,
            model.architecture,
            model.vocab_size,
            model.max_model_len,
            config,
            folder,
            read,
            model.groups,
            report,
        )
        network = chosen.network
    else:
        network = model.forward.network_of(module)
        pack(network, config, device_of(config))
    return network if model.vision is None or read.encoder is None else nn.ModuleList([network, read.encoder.module])
