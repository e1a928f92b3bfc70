"""A model that is loaded: the forward that computes it, and the properties that the engine needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .checks.row_independence import computes_single_tokens_differently
from .forward import Forward, StagedSteps
from .parallel.groups import RankGroups
from .parallel.shares import ModelShares
from .pooling.encoder import EncoderForward

if TYPE_CHECKING:
    from .images.vision_model import VisionModel
    from .pooling.pooler import PoolingModel
    from .shared_experts import ExpertRanks


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model, with the forward that computes it.

    Args:
        folder: contains ``tokenizer.json``.
        max_model_len: the requested limit, else the model's own. The KV cache of an engine may lower it, see
            ``KVCacheSize``.
        is_length_chosen: ``max_model_len`` was requested and must not be lowered.
        vocab_size: every valid token id is below it.
        num_parameters: shared ones are counted once.
        attention_backend: name of the attention kernels in use; see ``loading/loader.py``.
        pooling: converts hidden states, which ``forward`` then returns instead of logits, to results; None for a model
            that generates.
        vision: computes features of images, which replace tokens; None if the model takes no images.
        image_refusal: why the model takes no images.
        quantization: of its linear layers, chosen at the start, or the format of the file whose numbers they use as
            they are; None if they have the model's dtype.
        weight_conversions: transformers' renaming and fusing of the tensors of the files, to undo it when weights are
            saved.
        groups: the ranks that compute the model together; None for one rank.
        shares: the rank's parts of linear layers; None for whole layers, or parts by transformers' plan.
        expert_ranks: the ranks that hold the other experts; None if this one holds all.
        num_experts: of a layer, over all ranks; 0 if experts are not shared.
        is_row_independent: by construction, the bits of a token do not depend on other tokens.
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
    vision: VisionModel | None = None
    image_refusal: str = ""
    quantization: str | None = None
    weight_conversions: Any = None
    groups: RankGroups | None = None
    shares: ModelShares | None = None
    expert_ranks: ExpertRanks | None = None
    num_experts: int = 0
    is_row_independent: bool = False

    @property
    def computes_single_tokens_differently(self) -> bool:
        """Whether the result of a token depends on whether it is the only one of its request in a forward."""
        return computes_single_tokens_differently(self.forward)

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline that computes the model."""
        return 1 if self.groups is None else self.groups.layout.pipeline

    @property
    def staged_steps(self) -> StagedSteps:
        """The forward of a model that is computed in several stages."""
        assert isinstance(self.forward, StagedSteps), "the model is computed in one stage"
        return self.forward

    @property
    def network(self) -> nn.Module:
        """The module that is run and holds the weights."""
        return self.forward.network

    @property
    def enough_tokens(self) -> int | None:
        """Tokens of an encoder's step beyond which throughput does not grow; None if a step may be as large as fits."""
        return self.forward.enough_tokens if isinstance(self.forward, EncoderForward) else None

    @property
    def weights(self) -> nn.Module:
        """All modules that hold weights: ``network``, and the vision encoder if there is one."""
        return self.network if self.vision is None else nn.ModuleList([self.network, self.vision.encoder.module])

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return next(self.network.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.network.parameters()).device
