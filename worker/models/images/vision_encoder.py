"""The vision encoder of a model, separate from its text decoder."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from ....shared.errors import ModelLoadError
from .processor import ProcessedImage
from .text_decoder import join

# Names of the text decoder in transformers' classes.
_TEXT_PARTS = ("language_model", "text_model")


class VisionEncoder:
    """Computes features of images by transformers' ``get_image_features``.

    Args:
        module: the model that has this method; its text decoder may have been removed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @torch.inference_mode()
    def encode(self, image: ProcessedImage) -> Tensor:
        """Return the features of one image, ``[num_placeholders, hidden size]``, on the CPU.

        If deeper layers of the text decoder take features too, their columns follow, ``hidden size`` per layer.

        Raises:
            ValueError: there are not as many features as placeholders of the image. Some encoders skip tiles of zeros;
                then it is unknown which placeholder has which features.
        """
        weight = next(self.module.parameters())
        tensors = {
            name: tensor.to(weight.device, weight.dtype if tensor.is_floating_point() else None)
            for name, tensor in image.tensors.items()
        }
        output = cast(Any, self.module).get_image_features(**tensors)
        features = _packed(getattr(output, "pooler_output", output))
        deeper = [_packed(level) for level in getattr(output, "deepstack_features", None) or ()]
        if len(features) != len(image.tokens.places):
            raise ValueError(
                f"the vision encoder computed {len(features)} features of an image with "
                f"{len(image.tokens.places)} placeholders"
            )
        return torch.cat([features, *deeper], dim=1).cpu()


def text_module(module: PreTrainedModel) -> PreTrainedModel:
    """Return the text decoder of ``module`` with its head, as transformers' causal model. Weights are shared, not
    copied.

    Raises:
        ModelLoadError: ``module`` is built differently.
    """
    inner = getattr(module, "model", None)
    name = next((name for name in _TEXT_PARTS if hasattr(inner, name)), None)
    head: Any = module.get_output_embeddings()
    if name is None or head is None or not hasattr(inner, "get_image_features"):
        raise ModelLoadError(f"{type(module).__name__} has no text model with a head of its own")
    decoder = getattr(inner, name)
    if type(decoder.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        text_decoder = join(decoder, head)
        text_decoder.generation_config = module.generation_config
        return text_decoder.eval()
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(
            module.config.get_text_config(), dtype=module.dtype, attn_implementation="eager"
        )
    if type(decoder) is not type(causal.base_model):
        raise ModelLoadError(f"{type(module).__name__} has a text model of its own kind, {type(decoder).__name__}")
    setattr(causal, causal.base_model_prefix, decoder)
    causal.set_output_embeddings(head)
    if any(parameter.is_meta for parameter in causal.parameters()):
        raise ModelLoadError(f"{type(causal).__name__} has weights that {type(module).__name__} lacks")
    causal.generation_config = module.generation_config
    return causal.eval()


def split_vision_encoder(module: PreTrainedModel) -> VisionEncoder:
    """Remove the text decoder from ``module``, and return the rest as its vision encoder."""
    inner = cast(Any, module).model
    for name in _TEXT_PARTS:
        if hasattr(inner, name):
            delattr(inner, name)
    return VisionEncoder(inner)


def _packed(features: Any) -> Tensor:
    """Return features as ``[tokens, hidden size]``. Encoders return a tensor, one per image, or more dimensions."""
    if isinstance(features, Tensor):
        return features.reshape(-1, features.shape[-1])
    return torch.cat([_packed(part) for part in features])
