"""The two parts of a model that reads images: its vision encoder, and its text decoder as a causal model."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ....shared.errors import ModelLoadError
from .processor import ProcessedImage

# Names of the text decoder in transformers' classes.
_TEXT_PARTS = ("language_model", "text_model")
# transformers 5.24 calls it "cache".
_CACHE_FIELD = next(
    field.name for field in fields(CausalLMOutputWithPast) if field.name in ("cache", "past_key_values")
)


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


class TextDecoder(PreTrainedModel):
    """A decoder with a head, called like transformers' causal models.

    Args:
        decoder: computes hidden states; takes all other arguments.
        head: computes logits of them.
    """

    base_model_prefix = "model"

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return True. transformers searches a class's own module for experts, and those of ``decoder`` are in another
        module.
        """
        return True

    def __init__(self, decoder: PreTrainedModel, head: nn.Module) -> None:
        super().__init__(decoder.config)
        self.model = decoder
        self.lm_head = head

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits ``[B, R, V]`` of all tokens, of the last ones, or of some rows, like transformers' causal
        models.
        """
        output = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits: Any = self.lm_head(output.last_hidden_state[:, rows])
        return CausalLMOutputWithPast(logits=logits, **{_CACHE_FIELD: getattr(output, _CACHE_FIELD, None)})


def join(decoder: PreTrainedModel, head: nn.Module) -> TextDecoder:
    """Return decoder and head as one model, without a copy."""
    with torch.device("meta"):
        return TextDecoder(decoder, head)
