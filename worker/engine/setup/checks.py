"""Checks whether a loaded model and the options of its engine fit."""

from __future__ import annotations

from dataclasses import replace

import structlog

from ....shared.errors import ConfigurationError
from ...config.engine_config import EngineConfig
from ...models.loaded import LoadedModel
from ..execution.input_embeds import embeds_hidden_size
from ..offload.offload import check_model

log = structlog.get_logger(__name__)


def check_options(config: EngineConfig, model: LoadedModel) -> None:
    """Refuse options that the model does not support.

    Raises:
        ConfigurationError: the message names the option and the model.
    """
    _check_pooling(config, model)
    _check_speculation(config, model)
    check_model(config, model)


def _check_pooling(config: EngineConfig, model: LoadedModel) -> None:
    """Refuse options that a pooling model does not support."""
    if model.pooling is None:
        return
    for option, is_on in (
        ("deterministic", config.deterministic),
        ("async_scheduling", config.async_scheduling),
        ("enable_prompt_embeds", config.enable_prompt_embeds),
        ("logits_processors", bool(config.logits_processors)),
    ):
        if is_on:
            raise ConfigurationError(f"{option} is for models that generate, but this one is for pooling; leave it out")


def check_images(model: LoadedModel) -> LoadedModel:
    """Return ``model``, without images if it cannot be run from embeddings as it is served here.

    Call it before the KV cache is allocated.
    """
    if model.vision is None:
        return model
    try:
        embeds_hidden_size(model)
    except ConfigurationError:
        refusal = f"{model.architecture} cannot be run from embeddings as it is served here"
        log.warning("images_refused", architecture=model.architecture, reason=refusal)
        return replace(model, vision=None, image_refusal=refusal)
    return model


def _check_speculation(config: EngineConfig, model: LoadedModel) -> None:
    """Refuse speculative decoding for a pooling model, and for one that cannot undo a rejected draft token."""
    if not config.max_draft_tokens:
        return
    if model.pooling is not None:
        raise ConfigurationError(
            f"speculative {config.speculative!r} is for models that generate, but this one is for pooling; leave it out"
        )
    if model.forward.mode not in ("lean", "packed"):
        raise ConfigurationError(
            f"speculative {config.speculative!r} needs a model whose tokens are packed, and {model.architecture} is "
            f"computed in the mode {model.forward.mode!r}, which cannot undo a rejected draft token; leave it out"
        )
    if model.forward.keeps_state:
        raise ConfigurationError(
            f"speculative {config.speculative!r} needs a model that keeps only keys and values, and "
            f"{model.architecture} keeps states, which cannot undo a rejected draft token; leave it out"
        )
