"""The packed mode for models that count positions themselves, from the length of transformers' ``Cache``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ....shared.errors import ModelLoadError
from .packed import PackedForward


class PackedWithPast(PackedForward):
    """A packed forward of a model that counts positions itself, from the length of its ``Cache`` (Llama 4).

    The model adds that length to the numbers 0 to T - 1. Here each token has a length of its own, so that the sum is
    the token's position.

    Raises:
        ModelLoadError: the model takes no ``Cache``.
    """

    def _past(self, positions: Tensor) -> dict[str, Any]:
        if self._model.cache_argument is None:
            raise ModelLoadError("it takes no transformers Cache")
        return {self._model.cache_argument: _LengthOfEach(positions)}


class _LengthOfEach(DynamicCache):
    """An empty ``Cache`` whose length is a tensor ``[T]``."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self._lengths = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self._lengths

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states
