"""A Llama-like decoder as a loop over its layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ....kernels.rms_norm import add_rms_norm
from ..token_adapters import TokenAdapters
from .layer import Attend, LeanLayer, Norm

# Decoders that differ in nothing but biases, norms of heads, windows, and what the feed-forward part is.
FAMILIES = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "MixtralForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)


def is_of_a_lean_family(module: PreTrainedModel) -> bool:
    return type(module).__name__ in FAMILIES


class LeanDecoder(nn.Module):
    """Computes what ``own``, of a lean family, does, on the same weights.

    Raises:
        ModelLoadError: ``own`` is of another form than its kin.
    """

    def __init__(self, own: PreTrainedModel) -> None:
        super().__init__()
        base = own.model
        self.embed_tokens = base.embed_tokens
        self.rotary_emb = base.rotary_emb
        self.layers = nn.ModuleList(LeanLayer(layer) for layer in base.layers)
        self.norm = Norm(base.norm)
        self.lm_head = own.lm_head
        self.token_adapters = TokenAdapters()

    def get_input_embeddings(self) -> nn.Module:
        """What makes a row ``[hidden size]`` of a token id."""
        return self.embed_tokens

    def forward(self, hidden: Tensor, positions: Tensor, logit_rows: Tensor, attentions: Sequence[Attend]) -> Tensor:
        """Run packed tokens; return logits ``[R, V]``.

        Args:
            hidden: ``[T, hidden size]``, the tokens' embeddings.
            positions: ``[T]``.
            logit_rows: ``[R]`` tokens whose logits are wanted: the last layer transforms no others.
            attentions: one per layer.
        """
        return self.lm_head(self.transform(hidden, positions, logit_rows, attentions))

    def transform(self, hidden: Tensor, positions: Tensor, logit_rows: Tensor, attentions: Sequence[Attend]) -> Tensor:
        """``forward`` up to what ``lm_head`` makes logits of: ``[R, hidden size]``, normalised."""
        return self.normalise(
            *self.run_layers(hidden, torch.zeros_like(hidden), positions, attentions, last_rows=logit_rows)
        )

    def run_layers(
        self,
        hidden: Tensor,
        residual: Tensor,
        positions: Tensor,
        attentions: Sequence[Attend],
        *,
        last_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """What the layers here make of ``hidden`` and ``residual``, ``[T, hidden size]`` each.

        Args:
            last_rows: ``[R]``, all that the last of them transforms; None for every row.
        """
        cos, sin = (angles[0] for angles in self.rotary_emb(hidden, positions[None]))
        last = self.layers[-1]
        for layer, attend in zip(self.layers, attentions, strict=True):
            assert isinstance(layer, LeanLayer)
            found, residual = layer.attend(hidden, residual, cos, sin, attend)
            if layer is last and last_rows is not None:
                found, residual = found[last_rows], residual[last_rows]
                self.token_adapters.keep(last_rows)
            hidden, residual = layer.transform(found, residual)
        return hidden, residual

    def normalise(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """What ``lm_head`` makes logits of, from what the last layer has made."""
        return add_rms_norm(hidden, residual, self.norm.weight, self.norm.eps)[0]
