"""A decoder as a loop over its layers, with the embeddings of tokens per layer that some models have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...placing.token_adapters import TokenAdapters
from ...plan import DecoderPlan, LayerEmbeddingsPlan, LayerPlan, MixerPlan
from .layer import AnyLayer, Attend, FeedingLayer, LeanLayer
from .mixing import MixingLayer
from .norms import make_norm
from .rotation import MakeAngles, angles_of


class LayerEmbeddings(nn.Module):
    """See ``LayerEmbeddingsPlan``.

    Args:
        own: the whole model.
    """

    def __init__(self, own: nn.Module, plan: LayerEmbeddingsPlan, device: torch.device) -> None:
        super().__init__()
        self.plan = plan
        self.embedding: Any = own.get_submodule(plan.embedding)
        self.projection: Any = own.get_submodule(plan.projection)
        self.norm: Any = make_norm(own.get_submodule(plan.norm.name), plan.norm, device)

    def forward(self, stream: Tensor, token_ids: Tensor) -> Tensor:
        """Those of tokens ``[T]`` whose first embeddings are ``stream [T, hidden size]``: ``[T, layers, size]``."""
        plan = self.plan
        projected = (self.projection(stream) * plan.projection_scale).unflatten(-1, (-1, plan.size))
        normed = self.norm(projected.flatten(0, 1)).view_as(projected)
        return (normed + self.embedding(token_ids).view_as(normed)) * plan.sum_scale


class LeanDecoder(nn.Module):
    """Computes what ``own`` does, as ``plan`` says, on the same weights."""

    def __init__(self, own: PreTrainedModel, plan: DecoderPlan) -> None:
        super().__init__()
        self.plan = plan
        embedding, head = own.get_submodule(plan.embedding), own.get_submodule(plan.head)
        self.embed_tokens: Any = embedding
        self.layers = nn.ModuleList(_make_layer(own, layer) for layer in plan.layers)
        self.norm: Any = make_norm(own.get_submodule(plan.norm.name), plan.norm, own.device)
        self.lm_head: Any = head
        # Layers of several kinds may have angles of one module.
        modules = {angles.name: own.get_submodule(angles.name) for angles in plan.angles}
        self.rotary_embs = nn.ModuleList(modules.values())
        self._makers = [list(modules).index(angles.name) for angles in plan.angles]
        of_layers = plan.layer_embeddings
        self.layer_embeddings = None if of_layers is None else LayerEmbeddings(own, of_layers, own.device)
        self.token_adapters = TokenAdapters()
        # What ``run_layers`` asks.
        self.make_angles: MakeAngles = self.angles

    def get_input_embeddings(self) -> nn.Module:
        """What makes a row ``[hidden size]`` of a token id."""
        return self.embed_tokens

    def angles(self, hidden: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cosines and sines ``[T, R]`` of each of ``plan.angles``, as ``hidden`` is."""
        return [
            angles_of(self.rotary_embs[maker], plan, hidden, positions)
            for maker, plan in zip(self._makers, self.plan.angles, strict=True)
        ]

    def forward(
        self, hidden: Tensor, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, attentions: Sequence[Attend]
    ) -> Tensor:
        """Run packed tokens; return logits ``[R, V]``.

        Args:
            hidden: ``[T, hidden size]``, the tokens' embeddings.
            token_ids, positions: ``[T]``; the former count where layers have embeddings of their own.
            logit_rows: ``[R]`` tokens whose logits are wanted: the last layer transforms no others.
            attentions: one per layer.
        """
        return self.logits(self.transform(hidden, token_ids, positions, logit_rows, attentions))

    def transform(
        self, hidden: Tensor, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, attentions: Sequence[Attend]
    ) -> Tensor:
        """``forward`` up to what ``logits`` are made of: ``[R, hidden size]``, normalised."""
        hidden, residual = self.begin(hidden)
        embedded = None if self.layer_embeddings is None else self.layer_embeddings(hidden, token_ids)
        made = self.run_layers(hidden, residual, positions, attentions, last_rows=logit_rows, embedded=embedded)
        return self.normalise(*made)

    def begin(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer is given of embeddings ``[T, hidden size]``: these, and a stream with nothing in it."""
        if self.plan.stream_scale != 1.0:
            hidden = hidden * self.plan.stream_scale
        return hidden, torch.zeros_like(hidden)

    def run_layers(
        self,
        hidden: Tensor,
        residual: Tensor,
        positions: Tensor,
        attentions: Sequence[Attend],
        *,
        last_rows: Tensor | None,
        embedded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What the layers here make of ``hidden`` and ``residual``, ``[T, hidden size]`` each.

        Args:
            last_rows: ``[R]``, all that the last of them transforms; None for every row.
            embedded: ``[T, layers, size]``, what layers let in; None where they have no such part.
        """
        angles = self.make_angles(hidden, positions)
        last = self.layers[-1]
        for index, (layer, attend) in enumerate(zip(self.layers, attentions, strict=True)):
            assert isinstance(layer, AnyLayer)
            found, kept = layer.attend(hidden, residual, angles, attend)
            embedding = None if embedded is None else embedded[:, index]
            if layer is last and last_rows is not None:
                found, kept = found[last_rows], tuple(rows[last_rows] for rows in kept)
                embedding = None if embedding is None else embedding[last_rows]
                self.token_adapters.keep(last_rows)
            hidden, residual = layer.finish(*layer.transform(found, kept), embedding)
        return hidden, residual

    def normalise(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """What ``logits`` are made of, from what the last layer has made."""
        return self.norm.add(hidden, residual)[0]

    def logits(self, normed: Tensor) -> Tensor:
        """``[R, V]`` of what ``transform`` has made."""
        logits = self.lm_head(normed)
        if self.plan.logit_scale != 1.0:
            logits = logits * self.plan.logit_scale
        cap = self.plan.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _make_layer(own: PreTrainedModel, plan: LayerPlan) -> AnyLayer:
    if plan.attention is None:
        return FeedingLayer(own, plan)
    return MixingLayer(own, plan) if isinstance(plan.attention, MixerPlan) else LeanLayer(own, plan)
