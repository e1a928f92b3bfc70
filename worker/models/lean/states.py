"""States of running requests, of layers that keep some.

A slot has room for two: a step reads one and writes the other, and only when it has succeeded they change places. So a
step that fails, and is computed again, finds what was there before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.mixers import MixerState, MixerWeights, MixingBatch
from ..forward import ModelInput


class LayerStates:
    """Those of all layers that keep some; ``layers`` are their weights, ``dtype`` is the model's."""

    def __init__(self, layers: Sequence[MixerWeights], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._layers = layers
        self.states: list[MixerState] = []
        self._current: NDArray[np.int64] = np.zeros(0, np.int64)
        self._written: NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def bytes_per_request(self) -> int:
        """Of a slot, in all layers."""
        one = (MixerState.allocate(layer, 2, self._dtype, torch.device("meta")) for layer in self._layers)
        return sum(state.recent.nbytes + state.states.nbytes for state in one)

    def allocate(self, num_slots: int, device: torch.device) -> None:
        """Make room for ``num_slots`` requests; what was held is gone."""
        self.states = []  # first let go of what was
        self.states = [MixerState.allocate(layer, 2 * num_slots, self._dtype, device) for layer in self._layers]
        self._current = np.zeros(num_slots, np.int64)
        self._written = np.zeros(0, np.int64)

    def begin(self, step: ModelInput) -> MixingBatch:
        """Where the requests of ``step`` have their states, and where the next ones go."""
        slots = np.asarray(step.state_slots, np.int64)
        is_fresh = np.equal(step.batch.query_lens, step.batch.seq_lens)
        current = self._current[slots]
        self._written = slots
        return MixingBatch(
            torch.tensor(step.batch.query_lens),
            torch.from_numpy(np.where(is_fresh, -1, 2 * slots + current)),
            torch.from_numpy(2 * slots + 1 - current),
        )

    def commit(self) -> None:
        """What the last step has written is its requests' state from now on."""
        self._current[self._written] ^= 1
        self._written = np.zeros(0, np.int64)

    def tensors(self) -> list[Tensor]:
        """All that is held, ``[2 * slots, …]`` each."""
        return [tensor for state in self.states for tensor in (state.recent, state.states)]
