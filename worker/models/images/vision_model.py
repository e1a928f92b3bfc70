"""The models that are served with images, verified on the loaded model.

Models of ``FAMILIES`` replace placeholders by an image's features and then treat them as any embeddings. Models of
``ON_A_GRID`` also use positions in three axes, and features for deeper layers. In models of ``SEES_ITSELF`` the tokens
of an image attend to each other. The check: the whole model, with two images, must give the logits of its text decoder
with their features. Other models use images in more ways; of those the text decoders are served, without images.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
import torch

from ....shared.errors import ModelLoadError
from ....shared.params.images import MAX_IMAGES
from ...config.engine_config import EngineConfig
from ..forward import Forward
from .image_checks import longest_bidirectional, picture, processes_each_alone, verify_images, verify_text
from .model_parts import VisionEncoder, split_vision_encoder, text_module
from .processor import GridProcessor, ImageProcessor, OneVisionProcessor, axes_by_grid

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ON_A_GRID = frozenset({"glm46v", "glm4v", "glm4v_moe", "glm_ocr", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
SEES_ITSELF = frozenset({"gemma3"})
FAMILIES = (
    ON_A_GRID
    | SEES_ITSELF
    | frozenset(
        {
            "idefics3",
            "internvl",
            "lfm2_vl",
            "llava",
            "llava_next",
            "llava_onevision",
            "mistral3",
            "smolvlm",
            "vipllava",
        }
    )
)
# Features that other well-known models would need.
_REASONS = {
    "gemma3n": "its vision encoder needs timm, and each of its layers reads the token ids again",
    "gemma4": "the tokens of an image attend to each other there, and each of its layers reads the token ids again",
}
# Not even the text of these is served: transformers has no causal class, and they compute a prompt unlike all others.
_NOT_LOADED = {
    "paligemma": "all tokens of a prompt attend to each other there, text as well (a prefix), and here attention to "
    "text is causal; use Gemma 3",
}
# Replacements of processors that need torchvision, which they use only for videos.
_OWN_PROCESSORS: dict[str, Any] = {
    **dict.fromkeys(ON_A_GRID, GridProcessor),
    "llava_onevision": OneVisionProcessor,
}
# Most processors shrink larger images.
_LARGE_SIDE = 2048

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class VisionModel:
    """Vision encoder and processor of a model.

    Args:
        max_images: of a request. 1 if the processor treats several images differently from each alone.
        needs_vision_inputs: images need more than embeddings (``forward.VisionInputs``).
        longest_bidirectional: most tokens of an image that attend to each other, which one step must compute; 0 if
            attention is causal.
    """

    encoder: VisionEncoder
    processor: ImageProcessor
    max_images: int = MAX_IMAGES
    needs_vision_inputs: bool = False
    longest_bidirectional: int = 0

    def profile(self) -> None:
        """Encode a large image, to measure the memory of the encoder."""
        self.encoder.encode(self.processor.process(picture(_LARGE_SIDE, _LARGE_SIDE)))


class SplitModel(NamedTuple):
    """A loaded model in its parts.

    Args:
        text: the text decoder.
        vision: None if images are not requested or not possible.
        refusal: why no images are taken.
        encoder: that of ``vision``, or of a model that was not checked.
    """

    text: PreTrainedModel
    vision: VisionModel | None
    refusal: str
    encoder: VisionEncoder | None


def is_vision_type(model_config: PretrainedConfig) -> bool:
    """Whether a model of this configuration is loaded with its vision encoder."""
    return model_config.model_type in FAMILIES


def needs_vision_inputs(model_config: PretrainedConfig) -> bool:
    """Whether images need more than embeddings in a model of this configuration (``forward.VisionInputs``)."""
    return model_config.model_type in ON_A_GRID


def check_served(model_config: PretrainedConfig, architecture: str) -> None:
    """Reject a model that reads images and cannot be served at all.

    Raises:
        ModelLoadError: the model is one of those.
    """
    if why := _NOT_LOADED.get(model_config.model_type):
        raise ModelLoadError(f"{architecture} is not served: {why}")


def image_refusal_of(model_config: PretrainedConfig) -> str:
    """Return why a model outside ``FAMILIES`` takes no images."""
    model_type = model_config.model_type
    reason = _REASONS.get(model_type)
    if reason is not None:
        return f"images of {model_type} are not served by this version: {reason}"
    if getattr(model_config, "vision_config", None) is not None:
        return f"images of {model_type} are not served by this version, only its text"
    return "this model reads no images"


@torch.inference_mode()
def split_model(
    module: PreTrainedModel, folder: Path, vocab_size: int, *, wants_images: bool, trust_remote_code: bool
) -> SplitModel:
    """Split a model of ``FAMILIES`` into text decoder and vision encoder, and verify that together they equal the
    model.

    Raises:
        ModelLoadError: the text decoder cannot be extracted, or computes something else than inside the whole model.
    """
    text = text_module(module)
    verify_text(module, text, vocab_size)
    if not wants_images:
        split_vision_encoder(module)
        return SplitModel(text, None, "this engine was started without images (max_images 0)", None)
    try:
        processor = _load_processor(module.config, folder, trust_remote_code=trust_remote_code)
        verify_images(module, text, processor, vocab_size)
    except ModelLoadError as error:
        log.warning("images_refused", architecture=type(module).__name__, reason=str(error))
        split_vision_encoder(module)
        return SplitModel(text, None, f"this engine reads no images: {error}", None)
    max_images = MAX_IMAGES if processes_each_alone(processor) else 1
    encoder = split_vision_encoder(module)
    vision = VisionModel(
        encoder, processor, max_images, needs_vision_inputs(module.config), longest_bidirectional(processor)
    )
    return SplitModel(text, vision, "", encoder)


@torch.inference_mode()
def split_text_decoder(module: PreTrainedModel, vocab_size: int) -> PreTrainedModel:
    """Return the text decoder of a model of ``FAMILIES``, for ranks that do not encode images: only rank 0 does.

    Raises:
        ModelLoadError: as ``split_model``.
    """
    text = text_module(module)
    verify_text(module, text, vocab_size)
    split_vision_encoder(module)
    return text


def image_refusal_of_forward(vision: VisionModel, forward: Forward, config: EngineConfig) -> str:
    """Return why a model cannot take images in the mode that computes it; "" if it can."""
    if vision.needs_vision_inputs:
        need, modes = "positions in three axes", ("packed",)
    elif vision.longest_bidirectional:
        need, modes = "tokens that attend to each other", ("lean", "packed")
    else:
        return ""
    if forward.mode not in modes:
        return f"its images need {need}, which {forward.mode} forwards do not compute with"
    if config.deterministic:
        return f"its images need {need}, which --deterministic does not compute with"
    # Each other running request has a token in the step, too.
    num_tokens = vision.longest_bidirectional + config.max_num_seqs - 1
    if vision.longest_bidirectional and num_tokens > config.token_budget:
        return (
            f"the {vision.longest_bidirectional} tokens of an image have to be computed in one step, for which "
            f"max_num_batched_tokens ({config.token_budget}) is too small; set it to {num_tokens} at least, so that "
            f"max_num_seqs ({config.max_num_seqs}) requests can run at the same time"
        )
    return ""


def _load_processor(model_config: PretrainedConfig, folder: Path, *, trust_remote_code: bool) -> ImageProcessor:
    model_type, image_token_id = model_config.model_type, getattr(model_config, "image_token_id", 0)
    more: dict[str, Any] = {}
    if own := _OWN_PROCESSORS.get(model_type):
        more["make"] = partial(own.load, folder, image_token_id, trust_remote_code=trust_remote_code)
    if model_type in ON_A_GRID:
        more["axes_of"] = axes_by_grid(model_config)
    if model_type in SEES_ITSELF:
        more |= {"feature_token_id": image_token_id, "sees_itself": True}
    return ImageProcessor.load(folder, trust_remote_code=trust_remote_code, **more)
