"""What a loaded model and the options of its engine have to do with each other."""

from __future__ import annotations

import structlog

from ...shared.errors import ConfigurationError
from ..config.engine_config import EngineConfig
from ..models.loaded import LoadedModel
from .execution.input_embeds import embeds_hidden_size

log = structlog.get_logger(__name__)


def check_pooling(config: EngineConfig, model: LoadedModel) -> None:
    """Refuse what a model that pools does not do."""
    if model.pooling is None:
        return
    for option, is_on in (
        ("deterministic", config.deterministic),
        ("async_scheduling", config.async_scheduling),
        ("enable_prompt_embeds", config.enable_prompt_embeds),
        ("enable_lora", config.enable_lora),
        ("logits_processors", bool(config.logits_processors)),
    ):
        if is_on:
            raise ConfigurationError(f"{option} is for models that generate, and this one pools; leave it out")


def check_images(model: LoadedModel) -> None:
    """Let a model that cannot be run from embeddings, or not as it is served, take no images."""
    if model.vision is None:
        return
    try:
        embeds_hidden_size(model)
    except ConfigurationError:
        model.vision = None
        model.image_refusal = f"{model.architecture} cannot be run from embeddings as it is served here"
        log.warning("images_refused", architecture=model.architecture, reason=model.image_refusal)
