"""Attention by our kernel, states in transformers' ``Cache``: for convolutions, Mamba and linear attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ....kernels.paged_attention import PagedBatch
from ....shared.errors import ModelLoadError
from ..attention.call import AttentionCall, caches_of
from ..attention.paged_attention import PagedAttention
from ..forward import ForwardSettings
from .cached import CachedForward
from .packed import install_attention
from .partition import CutRule


class InterfaceAttention:
    """A ``cached.KeysAndValues`` for models that pass keys and values through transformers' attention interface."""

    def __init__(self, attention: PagedAttention, max_model_len: int) -> None:
        self._attention = attention
        self._max_model_len = max_model_len

    @property
    def attention_calls(self) -> list[AttentionCall]:
        return self._attention.calls

    @property
    def bytes_per_token(self) -> int:
        return self._attention.bytes_per_token

    @property
    def caches(self) -> list[Tensor]:
        return caches_of(self._attention.calls)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        self._attention.allocate(num_blocks, block_size, device)

    def record(self, run_forward: Callable[[], Any]) -> None:
        self._attention.record(run_forward, self._max_model_len)

    def begin(self, batch: PagedBatch) -> None:
        self._attention.begin(batch)

    def extend(self, new: Tensor) -> Tensor:
        return new

    def mask(self, batch: PagedBatch) -> Tensor:
        # No padding, because the kernel knows the lengths and layers with states only read new tokens.
        return torch.ones((len(batch.query_lens), batch.query_lens[0]), dtype=torch.long, device=batch.device)


def split_forward(module: PreTrainedModel, settings: ForwardSettings, rule: CutRule) -> CachedForward:
    """Create a ``Forward`` for a model that attends by transformers' interface and keeps states in its ``Cache``."""
    attention = PagedAttention(is_batch_invariant=settings.is_batch_invariant, backend=settings.attention_backend)
    install_attention(module, attention.name)
    forward = CachedForward("split", module, settings, InterfaceAttention(attention, settings.max_model_len), rule)
    if not forward.keeps_state:
        raise ModelLoadError("it keeps no states, so that splitting it would mend nothing")
    return forward
