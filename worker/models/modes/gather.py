"""Keys and values for a model that attends by its own code: gathered from the paged cache and passed to it.

Such a model asks its ``Cache`` for the past and attends to the result. So its new keys and values are stored in our
blocks, and it gets those of each request in full, padded on the left to the longest one. This copies the past of every
request in every layer and step, which is the price of not knowing how the model attends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ....kernels.paged_attention import PagedBatch
from ....shared.errors import ModelLoadError
from ..attention.caches import PagedTensor
from ..attention.call import AttentionCall
from ..forward import ForwardSettings
from .cached import CachedForward
from .partition import CutRule


class GatheredTokens:
    """A ``cached.KeysAndValues`` for all tensors that a model keeps per token, in the order in which it passes them."""

    def __init__(self) -> None:
        self._tensors: list[PagedTensor] = []
        self._batch: PagedBatch | None = None
        self._next = 0

    @property
    def attention_calls(self) -> list[AttentionCall]:
        return []

    @property
    def bytes_per_token(self) -> int:
        return sum(tensor.bytes_per_token for tensor in self._tensors)

    @property
    def caches(self) -> list[Tensor]:
        return [tensor.blocks for tensor in self._tensors]

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        for tensor in self._tensors:
            tensor.allocate(num_blocks, block_size, device)

    def record(self, run_forward: Callable[[], Any]) -> None:
        self._batch, self._tensors = None, []
        run_forward()

    def begin(self, batch: PagedBatch) -> None:
        self._batch, self._next = batch, 0

    def extend(self, new: Tensor) -> Tensor:
        """Store ``new`` of this forward's tokens, ``[B, H, T, D]``; return the tensor of all tokens, ``[B, H, S, D]``.

        ``S`` is the longest request's length. Shorter ones repeat their first token on the left.
        """
        if new.ndim != 4:
            raise ModelLoadError(f"it keeps keys of shape {tuple(new.shape)}, where [B, H, T, D] was expected")
        if self._batch is None:
            self._tensors.append(PagedTensor((new.shape[1], new.shape[3]), new.dtype))
            return new
        cache = self._tensors[self._next].slots()
        self._next += 1
        cache[self._batch.slot_mapping.long()] = new.transpose(1, 2).flatten(0, 1)
        slots = self._batch.derived("left_padded", lambda batch=self._batch: left_padded_slots(batch))
        return cache[slots].transpose(1, 2)

    def mask(self, batch: PagedBatch) -> Tensor:
        return (_left_padded_positions(batch) >= 0).long()


def gather_forward(module: PreTrainedModel, settings: ForwardSettings, rule: CutRule) -> CachedForward:
    """Create a ``Forward`` for a model that keeps its keys and values in transformers' ``Cache``."""
    module.set_attn_implementation("eager")
    return CachedForward("gather", module, settings, GatheredTokens(), rule)


def left_padded_slots(batch: PagedBatch) -> Tensor:
    """Return the cache slots of all tokens of each request, ``[B, S]``, those of shorter ones at the end of their
    row.
    """
    positions = _left_padded_positions(batch).clamp(min=0)
    blocks = batch.block_table.long().gather(1, positions // batch.block_size)
    return blocks * batch.block_size + positions % batch.block_size


def _left_padded_positions(batch: PagedBatch) -> Tensor:
    """Return the position of each token, ``[B, S]``; below 0 is padding."""
    longest = max(batch.seq_lens)
    padding = longest - torch.tensor(batch.seq_lens, device=batch.device)
    return torch.arange(longest, device=batch.device) - padding[:, None]
