"""The text decoder of a model that reads images as a causal model, where transformers has no class for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


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
        return CausalLMOutputWithPast(logits=logits, past_key_values=getattr(output, "past_key_values", None))


def join(decoder: PreTrainedModel, head: nn.Module) -> TextDecoder:
    """Return decoder and head as one model, without a copy."""
    with torch.device("meta"):
        return TextDecoder(decoder, head)
