"""A text model of a family that reads images as a causal model, where transformers has no class for that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class TextDecoder(PreTrainedModel):
    """A decoder and a head, called as transformers' causal models are.

    Args:
        decoder: what makes hidden states; takes whatever else it is handed.
        head: what makes logits of them.
    """

    base_model_prefix = "model"

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """transformers looks into a class's own module for experts; those of a decoder are the decoder's business."""
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
        """As transformers' causal models; logits ``[B, R, V]`` of all tokens, of the last ones, or of some rows."""
        made = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits: Any = self.lm_head(made.last_hidden_state[:, rows])
        return CausalLMOutputWithPast(logits=logits, past_key_values=getattr(made, "past_key_values", None))


def join(decoder: PreTrainedModel, head: nn.Module) -> TextDecoder:
    """Return both as one model; nothing is copied."""
    with torch.device("meta"):
        return TextDecoder(decoder, head)
