"""The interface of a loaded model that computes steps: its inputs, and the methods that every mode offers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...kernels.dispatch import AUTO
from ...kernels.paged_attention import PagedBatch
from .attention.call import AttentionCall
from .parallel.groups import RankGroups
from .plan import DecoderPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True)
class VisionInputs:
    """Inputs of a step from images, in addition to embeddings, for models that need more. Only packed forwards take
    them.

    Args:
        axes: ``[3, T]``, positions in three axes; None if the step's ``positions`` hold for all axes.
        places: ``[E]``, indices of the tokens of images, ascending.
        deeper: per layer, for the first layers of the model: features to add to these tokens after it, ``[E, hidden
            size]``.
    """

    axes: Tensor | None
    places: Tensor | None = None
    deeper: tuple[Tensor, ...] = ()

    def arguments(self, num_tokens: int) -> dict[str, Any]:
        """Return the arguments of transformers' models, for one row of ``num_tokens``."""
        arguments: dict[str, Any] = {} if self.axes is None else {"position_ids": self.axes[:, None]}
        if self.places is not None and self.deeper:
            is_image = torch.zeros(1, num_tokens, dtype=torch.bool, device=self.places.device)
            is_image[0, self.places] = True
            arguments |= {"visual_pos_masks": is_image, "deepstack_visual_embeds": list(self.deeper)}
        return arguments


@dataclass(slots=True)
class ModelInput:
    """The packed tokens of one step. Tokens of a request are contiguous and in order.

    Args:
        token_ids, positions: ``[T]``. A negative token id is an index of ``fed_tokens``, as in Python.
        logit_rows: ``[R]`` ascending, indices of the tokens that need logits.
        batch: the tokens of each request, and its blocks.
        state_slots: ``[B]``, the row of each request in the state pool. A request keeps its row while it runs. The
            contents of the row are ignored if the request starts with its first token.
        inputs_embeds: ``[T, hidden size]``, used instead of the embeddings of ``token_ids``; None for those.
        token_lora: ``[T]``, the adapter of each token as ``kernels.lora`` takes it, negative for none; None if no token
            has one. Only forwards that ``adapters/attach.py`` knows use it.
        token_types: ``[T]``, 1 for tokens of the second text of a pair; None without pairs.
        vision_inputs: inputs from images in addition to ``inputs_embeds``; None if there are none.
        fed_tokens: tokens that the step before has sampled, on the model's device. Only forwards that run captured
            graphs get them; others get the token ids.
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
    fed_tokens: Tensor | None = None

    def with_fed_tokens(self) -> ModelInput:
        """Return this step with the tokens themselves in place of indices of ``fed_tokens``."""
        if self.fed_tokens is None:
            return self
        return replace(self, token_ids=feed(self.token_ids, self.fed_tokens), fed_tokens=None)


def feed(token_ids: Tensor, fed_tokens: Tensor) -> Tensor:
    """Return ``token_ids``, ``[T]``, with the elements of ``fed_tokens`` in place of negative ones, which are indices
    as in Python. The host does not wait for the device.
    """
    return torch.where(token_ids < 0, fed_tokens[token_ids.clamp(max=-1)], token_ids)


@dataclass(frozen=True)
class ForwardSettings:
    """Settings of the engine that a mode needs.

    Args:
        max_model_len: most tokens of a request.
        is_batch_invariant: attention gives a token the same bits in every batch.
        attention_backend: one of ``kernels.dispatch.BACKENDS``, or "auto" for the best one of the device.
        groups: the ranks that compute the model together; None for one rank.
        plan: lean plan of a part of a model, which cannot be read from the part; None for a whole model.
    """

    max_model_len: int
    is_batch_invariant: bool = False
    attention_backend: str = AUTO
    groups: RankGroups | None = None
    plan: DecoderPlan | None = None


@runtime_checkable
class StagedSteps(Protocol):
    """A ``Forward`` that can have several steps in flight."""

    def start(self, step: ModelInput) -> None:
        """Begin ``step``, which shares no request with steps in flight."""
        ...

    def finish(self) -> Tensor:
        """Return the result of ``run`` for the oldest step that was started."""
        ...


class Forward(Protocol):
    """A model with its caches. Call ``allocate`` first, then ``run`` and ``commit`` for every step."""

    @property
    def mode(self) -> str:
        """Name of the mode, for logs and messages: "lean", "packed", "split", "gather" or "encoder"."""
        ...

    @property
    def network(self) -> nn.Module:
        """The module that is run: the transformers model, or its replacement."""
        ...

    def network_of(self, module: PreTrainedModel) -> nn.Module:
        """Convert ``module``, the same model loaded again, as the model was converted to ``network``."""
        ...

    @property
    def takes_embeds(self) -> bool:
        """Whether it can run from ``inputs_embeds``."""
        ...

    @property
    def keeps_state(self) -> bool:
        """Whether a request has state besides keys and values, so that blocks alone cannot share its prefix."""
        ...

    @property
    def attention_calls(self) -> list[AttentionCall]:
        """The attention calls that our kernels compute; empty if the model attends by its own code."""
        ...

    @property
    def caches(self) -> list[Tensor]:
        """Paged caches of all layers, ``[NB, ...]`` each. A full block is its part of each of them."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in the paged caches of all layers."""
        ...

    @property
    def bytes_per_request(self) -> int:
        """Bytes of a request in the state pool."""
        ...

    def allocate(self, num_blocks: int, block_size: int, num_slots: int, device: torch.device) -> None:
        """Allocate the paged caches and the state pool, and drop earlier ones. Sizes of 0 free their memory."""
        ...

    def run(self, step: ModelInput) -> Tensor:
        """Compute ``step``; return logits ``[R, V]``."""
        ...

    def commit(self) -> None:
        """Make the states that the last ``run`` computed the current states of its requests.

        A step may fail after its forward and is then computed again. Until it has succeeded, it must change nothing.
        """
        ...

    def profile(self, num_tokens: int, num_logit_rows: int) -> None:
        """Run a forward of that size without attention, to measure the memory of its activations.

        It needs no caches. Allocate them again afterwards.
        """
        ...


class TokenAdapters:
    """Set before each forward of a model, and read by the hooks that add adapters to the outputs of its layers.

    Attributes:
        slots: ``[T]``, the slot of each row that layers compute now, negative for none; None if no row has one.
        is_used: some hook reads it, so a forward that is captured must also be captured with adapters.
    """

    def __init__(self) -> None:
        self.slots: Tensor | None = None
        self.is_used = False

    def begin(self, token_lora: Tensor | None) -> None:
        """Begin a forward of these tokens."""
        self.slots = token_lora

    def keep(self, rows: Tensor) -> None:
        """Restrict the rows to ``rows``, which are the only ones that layers compute from now on."""
        if self.slots is not None:
            self.slots = self.slots[rows]
