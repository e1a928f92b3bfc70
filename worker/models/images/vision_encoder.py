"""The part of a model that sees, apart from the part that speaks."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from ....shared.errors import ModelLoadError
from .processor import ProcessedImage
from .text_decoder import join

# Under which names transformers' classes hold the part that speaks.
_TEXT_PARTS = ("language_model", "text_model")


class VisionEncoder:
    """Makes features of images: what transformers' ``get_image_features`` does.

    Args:
        module: the model that has that method; what speaks may have been taken out of it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @torch.inference_mode()
    def encode(self, image: ProcessedImage) -> Tensor:
        """Return the features of one image, ``[num_placeholders, hidden size]``, on the CPU.

        Where deeper layers of the text model take features, too, theirs stand behind, as many columns for each layer.

        Raises:
            ValueError: their number is not that of the image's placeholders. Some encoders pass over tiles that are all
                zero: then nobody knows which placeholder has which features.
        """
        weight = next(self.module.parameters())
        tensors = {
            name: tensor.to(weight.device, weight.dtype if tensor.is_floating_point() else None)
            for name, tensor in image.tensors.items()
        }
        found = cast(Any, self.module).get_image_features(**tensors)
        features = _packed(getattr(found, "pooler_output", found))
        deeper = [_packed(level) for level in getattr(found, "deepstack_features", None) or ()]
        if len(features) != len(image.tokens.places):
            raise ValueError(
                f"the encoder made {len(features)} features of an image with {len(image.tokens.places)} placeholders"
            )
        return torch.cat([features, *deeper], dim=1).cpu()


def text_module(module: PreTrainedModel) -> PreTrainedModel:
    """Return the part of ``module`` that speaks, with its head, as the causal model that transformers has for it.

    The weights are the same; nothing is copied.

    Raises:
        ModelLoadError: ``module`` is built in another way.
    """
    inner = getattr(module, "model", None)
    name = next((name for name in _TEXT_PARTS if hasattr(inner, name)), None)
    head: Any = module.get_output_embeddings()
    if name is None or head is None or not hasattr(inner, "get_image_features"):
        raise ModelLoadError(f"{type(module).__name__} has no text model with a head of its own")
    decoder = getattr(inner, name)
    if type(decoder.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        joined = join(decoder, head)
        joined.generation_config = module.generation_config
        return joined.eval()
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
    """Return what sees in ``module``, and take what speaks out of it."""
    inner = cast(Any, module).model
    for name in _TEXT_PARTS:
        if hasattr(inner, name):
            delattr(inner, name)
    return VisionEncoder(inner)


def _packed(features: Any) -> Tensor:
    """``[tokens, hidden size]``. Some encoders return a tensor, some a tensor per image, some have more dimensions."""
    if isinstance(features, Tensor):
        return features.reshape(-1, features.shape[-1])
    return torch.cat([_packed(part) for part in features])
