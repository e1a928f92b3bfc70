"""How a loaded model computes one step: what the engine hands over, and what every way of computing it offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...kernels.dispatch import AUTO
from ...kernels.paged_attention import PagedBatch
from .attention.call import AttentionCall
from .parallel.groups import RankGroups
from .plan import DecoderPlan


@dataclass(slots=True)
class VisionInputs:
    """What a step has of images beside embeddings, for models that do more with them. Packed forwards alone take it.

    Args:
        axes: ``[3, T]``, positions in three axes; None where the step's ``positions`` are those of all.
        places: ``[E]``, the tokens that are of images, ascending.
        deeper: for each of the model's first layers, what is added behind it to those tokens, ``[E, hidden size]``.
    """

    axes: Tensor | None
    places: Tensor | None = None
    deeper: tuple[Tensor, ...] = ()

    def arguments(self, num_tokens: int) -> dict[str, Any]:
        """As transformers' models take it, for one row of ``num_tokens``."""
        named: dict[str, Any] = {} if self.axes is None else {"position_ids": self.axes[:, None]}
        if self.places is not None and self.deeper:
            is_seen = torch.zeros(1, num_tokens, dtype=torch.bool, device=self.places.device)
            is_seen[0, self.places] = True
            named |= {"visual_pos_masks": is_seen, "deepstack_visual_embeds": list(self.deeper)}
        return named


@dataclass(slots=True)
class ModelInput:
    """One step's tokens, packed: those of a request lie together and in order.

    Args:
        token_ids, positions: ``[T]``.
        logit_rows: ``[R]`` ascending, the tokens whose logits are wanted.
        batch: which tokens belong to which request, and where their blocks are.
        state_slots: ``[B]``, a row of the state pool for each request. It stays the request's own while it runs, and
            what lies in it counts for nothing when the request begins from its first token.
        inputs_embeds: ``[T, hidden size]`` in place of the embeddings of ``token_ids``; None for those.
        token_lora: ``[T]``, the adapter of each token as ``kernels.lora`` takes it, negative for none; None if no token
            has one. Only forwards that ``adapters/attach.py`` knows compute with it.
        token_types: ``[T]``, 1 for tokens of the second text of a pair; None if there is no pair.
        vision_inputs: what there is of images beside ``inputs_embeds``; None if that is all.
    """

    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    batch: PagedBatch
    state_slots: NDArray[np.int64]
    inputs_embeds: Tensor | None = None
    token_lora: Tensor | None = None
    token_types: Tensor | None = None
    vision_inputs: VisionInputs | None = None


@dataclass(frozen=True)
class ForwardSettings:
    """What a way of computing has to know of the engine.

    Args:
        max_model_len: most tokens of a request.
        is_batch_invariant: attention gives a token the same bits in every batch.
        attention_backend: what attends; one of ``kernels.dispatch.BACKENDS``, or "auto" for what suits the device.
        groups: the ranks that compute the model together; None where one does.
        plan: how the lean path computes a part of a model, which does not show it; None of a whole one.
    """

    max_model_len: int
    is_batch_invariant: bool = False
    attention_backend: str = AUTO
    groups: RankGroups | None = None
    plan: DecoderPlan | None = None


class StagedSteps(Protocol):
    """A ``Forward`` of which several steps may be under way."""

    def start(self, step: ModelInput) -> None:
        """Begin ``step``, which shares no request with those that are under way."""
        ...

    def finish(self) -> Tensor:
        """What ``run`` returns, of the oldest step that was started."""
        ...


class Forward(Protocol):
    """A model with its caches. First ``allocate``, then ``run`` and ``commit`` every step."""

    @property
    def mode(self) -> str:
        """Its name, for logs and messages: "lean", "packed", "split", "gather" or "encoder"."""
        ...

    @property
    def network(self) -> nn.Module:
        """What computes: the transformers model, or what stands in its place."""
        ...

    def network_of(self, module: PreTrainedModel) -> nn.Module:
        """Make of ``module``, the same model loaded again, what ``network`` was made of it."""
        ...

    @property
    def takes_embeds(self) -> bool:
        """It can be run from ``inputs_embeds``."""
        ...

    @property
    def keeps_state(self) -> bool:
        """A request has state besides keys and values, so its beginning cannot be shared by blocks."""
        ...

    @property
    def attention_calls(self) -> list[AttentionCall]:
        """The attentions that our kernels compute; none of a model that attends by its own code."""
        ...

    @property
    def caches(self) -> list[Tensor]:
        """What is paged of all layers, ``[NB, ...]`` each: a full block's part of each is the block whole."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Of the paged cache, in all layers."""
        ...

    @property
    def bytes_per_request(self) -> int:
        """Of the state pool."""
        ...

    def allocate(self, num_blocks: int, block_size: int, num_slots: int, device: torch.device) -> None:
        """Make the paged caches and the state pool; what earlier ones held is gone. Sizes of 0 free their memory."""
        ...

    def run(self, step: ModelInput) -> Tensor:
        """Compute ``step``; return logits ``[R, V]``."""
        ...

    def commit(self) -> None:
        """Let the states that the last ``run`` has computed be those of its requests.

        A step may fail after its forward, and is then computed again: until it has succeeded it leaves nothing behind.
        """
        ...

    def profile(self, num_tokens: int, num_logit_rows: int) -> None:
        """Run a forward of that size without attention, to see what memory its activations take.

        Caches are not needed for it, and have to be allocated anew afterwards.
        """
        ...
