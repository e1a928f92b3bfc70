"""Memory of layers for requests: tensors in blocks of tokens, and states besides keys and values.

Convolutions and recurrences such as Mamba's have states. transformers keeps states in the layers of its ``Cache``, with
one row per request of the batch. We keep those of all running requests in a pool, ``[num_slots, ...]`` per state, copy
the rows of a forward's requests into the layers before it, and copy the new ones back afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....kernels.huge_pages import zeros_in_small_pages

if TYPE_CHECKING:
    from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

_KINDS = ("conv_states", "recurrent_states")


class PagedTensor:
    """A tensor ``[NB, BS, *shape]`` once allocated; ``shape`` is that of one token, heads first."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.blocks = torch.empty(0, dtype=dtype)

    @property
    def bytes_per_token(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.blocks = zeros((num_blocks, block_size, *self.shape), self.dtype, device)

    def slots(self) -> Tensor:
        """Return the same memory as ``[NB * BS, *shape]``."""
        return self.blocks.flatten(0, 1)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros whose memory is taken only when it is written.

    On a CPU it is in small pages: a cache has many such tensors, and the first blocks of each would fill a huge page.
    """
    if device.type == "cpu":
        return zeros_in_small_pages(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


@dataclass
class State:
    """A state of a layer."""

    holder: dict[int, Any]
    key: int
    shape: torch.Size
    dtype: torch.dtype
    pool: Tensor
    pending: list[Tensor]


class StatePool:
    """The states of all running requests.

    Args:
        cache: its layers hold the states during a forward.
    """

    def __init__(self, cache: Cache) -> None:
        from transformers.cache_utils import LinearAttentionCacheLayerMixin

        self._layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        self._states: list[State] = []
        self._pending_slots: list[Tensor] = []

    def discover(self) -> None:
        """Find the states in the layers, after a forward of one request."""
        self._states = list(_states_of(self._layers))

    @property
    def bytes_per_request(self) -> int:
        return sum(state.shape.numel() * state.dtype.itemsize for state in self._states)

    def allocate(self, num_slots: int, device: torch.device) -> None:
        """Allocate states for ``num_slots`` requests."""
        self.discard()
        for state in self._states:
            state.pool = torch.zeros((num_slots, *state.shape), dtype=state.dtype, device=device)

    def begin(self, slots: Tensor | None) -> None:
        """Copy the states of ``slots``, ``[B]``, into the cache's layers; None for one request without states yet."""
        for layer in self._layers:
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, slots is not None)
        for state in self._states:
            # a copy, because the layers write in place
            state.holder[state.key] = (
                state.pool.new_zeros(1, *state.shape) if slots is None else state.pool.index_select(0, slots)
            )

    def take(self, slots: Tensor) -> None:
        """Record the current states of the layers as the next states of ``slots``, ``[B]``."""
        self._pending_slots.append(slots)
        for state in self._states:
            state.pending.append(state.holder[state.key])

    def commit(self) -> None:
        """Write the recorded states to the pool."""
        if self._pending_slots:
            slots = torch.cat(self._pending_slots)
            for state in self._states:
                state.pool.index_copy_(0, slots, torch.cat(state.pending))
        self.discard()

    def discard(self) -> None:
        """Drop the recorded states."""
        self._pending_slots = []
        for state in self._states:
            state.pending = []


def _states_of(layers: list[LinearAttentionCacheLayerMixin]) -> Iterator[State]:
    for layer in layers:
        for kind in _KINDS:
            holder: dict[int, Any] = getattr(layer, kind)
            for key, value in holder.items():
                # A layer may lack a recurrence, or a convolution.
                if value is not None:
                    yield State(holder, key, value.shape[1:], value.dtype, value[:0], [])
