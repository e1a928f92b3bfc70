"""A model that is loaded: the forward that computes it, and the properties that the engine needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .adapters.slots import AdapterSlots
from .attention.page_layout import PageLayout
from .checks.row_independence import computes_single_tokens_differently
from .forward import Forward
from .images.vision_model import VisionModel
from .parallel.groups import RankGroups
from .pooling.encoder import EncoderForward
from .pooling.pooler import PoolingModel
from .shared_experts.ranks import ExpertRanks


@dataclass
class LoadedModel:
    """A model and the way in which it is computed.

    Args:
        folder: where ``tokenizer.json`` is.
        max_model_len: what was asked for, else the model's own limit.
        is_length_chosen: ``max_model_len`` was asked for, and may not be lowered.
        vocab_size: every valid token id is below it.
        num_parameters: shared ones counted once.
        attention_backend: what attends; see ``attention_backend.py``.
        pooling: what is made of hidden states, which ``forward`` then returns in place of logits; None of a model that
            generates.
        adapters: where adapters are computed with; None where none are served.
        vision: what makes features of images, which stand in the place of tokens; None of a model that takes none.
        image_refusal: why it takes none.
        quantization: of its linear layers, chosen at the start; None where they are in the dtype.
        weight_conversions: how transformers named and fused what the files have, for the way back.
        groups: the ranks that compute it together; None of a model that one does.
        expert_ranks: who has the other experts; None of a model that has all.
        num_experts: of a layer, at all ranks together; 0 where they are not shared.
        is_row_independent: nothing in the way that it is computed lets bits of a token depend on the others.
        pages: how its layers share the KV cache, where some look at the last tokens alone; None for one table of all.
    """

    forward: Forward
    folder: Path
    architecture: str
    max_model_len: int
    is_length_chosen: bool
    vocab_size: int
    eos_token_ids: list[int]
    num_parameters: int
    attention_backend: str
    pooling: PoolingModel | None = None
    adapters: AdapterSlots | None = None
    vision: VisionModel | None = None
    image_refusal: str = ""
    quantization: str | None = None
    weight_conversions: Any = None
    groups: RankGroups | None = None
    expert_ranks: ExpertRanks | None = None
    num_experts: int = 0
    is_row_independent: bool = False
    pages: PageLayout | None = None

    @property
    def computes_single_tokens_differently(self) -> bool:
        """Whether the result of a token depends on whether it is the only one of its request in a forward."""
        return computes_single_tokens_differently(self.forward)

    @property
    def network(self) -> nn.Module:
        """What computes, and holds the weights."""
        return self.forward.network

    @property
    def enough_tokens(self) -> int | None:
        """Of a step of an encoder: more are computed no sooner for it. None where a step may have as many as fit."""
        return self.forward.enough_tokens if isinstance(self.forward, EncoderForward) else None

    @property
    def weights(self) -> nn.Module:
        """All modules that hold weights: ``network``, and the encoder of a model that sees."""
        return self.network if self.vision is None else nn.ModuleList([self.network, self.vision.encoder.module])

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.network.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(self.network.parameters()).device
