"""A decoder as a loop over its layers, with the embeddings of tokens per layer that some models have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...forward import TokenAdapters
from ...plan import DecoderPlan, LayerEmbeddingsPlan, LayerPlan, MixerPlan
from .layer import AnyLayer, Attend, FeedingLayer, LeanLayer
from .mixing import MixingLayer
from .norms import make_norm
from .rotation import MakeAngles, angles_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LayerEmbeddings(nn.Module):
    """The module of a ``LayerEmbeddingsPlan``.

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
        """Return embeddings ``[T, layers, size]`` of tokens ``[T]`` whose first embeddings are ``stream [T, hidden
        size]``.
        """
        plan = self.plan
        projected = (self.projection(stream) * plan.projection_scale).unflatten(-1, (-1, plan.size))
        normed = self.norm(projected.flatten(0, 1)).view_as(projected)
        return (normed + self.embedding(token_ids).view_as(normed)) * plan.sum_scale


class LeanDecoder(nn.Module):
    """Computes the same as ``own``, by ``plan``, on the same weights.

    Args:
        map_layers: like ``map``, calls a function that creates a layer for each plan of one.
    """

    def __init__(
        self,
        own: PreTrainedModel,
        plan: DecoderPlan,
        map_layers: Callable[[Callable[[LayerPlan], AnyLayer], Sequence[LayerPlan]], Iterable[AnyLayer]] = map,
    ) -> None:
        super().__init__()
        self.plan = plan
        embedding, head = own.get_submodule(plan.embedding), own.get_submodule(plan.head)
        self.embed_tokens: Any = embedding
        self.layers = nn.ModuleList(map_layers(partial(_make_layer, own), plan.layers))
        self.norm: Any = make_norm(own.get_submodule(plan.norm.name), plan.norm, own.device)
        self.lm_head: Any = head
        # Layers of several kinds may have angles of one module.
        modules = {angles.name: own.get_submodule(angles.name) for angles in plan.angles}
        self.rotary_embs = nn.ModuleList(modules.values())
        self._makers = [list(modules).index(angles.name) for angles in plan.angles]
        of_layers = plan.layer_embeddings
        self.layer_embeddings = None if of_layers is None else LayerEmbeddings(own, of_layers, own.device)
        self.token_adapters = TokenAdapters()
        # The function that ``run_layers`` calls.
        self.make_angles: MakeAngles = self.angles

    def get_input_embeddings(self) -> nn.Module:
        """Return the module that maps a token id to a row ``[hidden size]``."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer."""
        return self.lm_head

    def angles(self, hidden: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return cosines and sines ``[T, R]`` for each of ``plan.angles``, in dtype and on device of ``hidden``."""
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
            token_ids, positions: ``[T]``; token ids are used only by per-layer embeddings.
            logit_rows: ``[R]`` indices of tokens that need logits; the last layer transforms no others.
            attentions: one per layer.
        """
        return self.logits(self.transform(hidden, token_ids, positions, logit_rows, attentions))

    def transform(
        self, hidden: Tensor, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, attentions: Sequence[Attend]
    ) -> Tensor:
        """Compute ``forward`` up to the input of ``logits``: ``[R, hidden size]``, normalised."""
        hidden, residual = self.begin(hidden)
        embedded = None if self.layer_embeddings is None else self.layer_embeddings(hidden, token_ids)
        last = self.run_layers(hidden, residual, positions, attentions, last_rows=logit_rows, embedded=embedded)
        return self.normalise(*last)

    def begin(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of the first layer for embeddings ``[T, hidden size]``: these, and an empty residual
        stream.
        """
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
        """Run these layers on ``hidden`` and ``residual``, ``[T, hidden size]`` each, and return both.

        Args:
            last_rows: ``[R]``, the only rows that the last layer transforms; None for all.
            embedded: ``[T, layers, size]``, per-layer embeddings; None for none.
        """
        angles = self.make_angles(hidden, positions)
        last = self.layers[-1]
        for index, (layer, attend) in enumerate(zip(self.layers, attentions, strict=True)):
            assert isinstance(layer, AnyLayer)
            mixed, carried = layer.attend(hidden, residual, angles, attend)
            embedding = None if embedded is None else embedded[:, index]
            if layer is last and last_rows is not None:
                mixed, carried = mixed[last_rows], tuple(rows[last_rows] for rows in carried)
                embedding = None if embedding is None else embedding[last_rows]
                self.token_adapters.keep(last_rows)
            hidden, residual = layer.finish(*layer.transform(mixed, carried), embedding)
        return hidden, residual

    def normalise(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """Return the input of ``logits``, from the outputs of the last layer."""
        return self.norm.add(hidden, residual)[0]

    def logits(self, normed: Tensor) -> Tensor:
        """Compute logits ``[R, V]`` from the result of ``transform``."""
        logits = self.lm_head(normed)
        if self.plan.logit_scale != 1.0:
            logits = logits * self.plan.logit_scale
        cap = self.plan.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _make_layer(own: PreTrainedModel, plan: LayerPlan) -> AnyLayer:
    if plan.attention is None:
        return FeedingLayer(own, plan)
    return MixingLayer(own, plan) if isinstance(plan.attention, MixerPlan) else LeanLayer(own, plan)
