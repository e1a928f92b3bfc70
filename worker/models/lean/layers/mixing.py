"""Layers that mix tokens through a state per request instead of attention, and the states of running requests.

A slot holds two states: a step reads one and writes the other, and they are swapped only when the step has succeeded.
So a step that fails and is computed again finds the state from before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .....kernels.mixers import MixerState, MixerWeights, MixingBatch
from ...forward import ModelInput
from ...plan import LayerPlan, MixerPlan
from .fuse import fuse_linear
from .layer import Angles, AnyLayer, Attend


class MixingLayer(AnyLayer):
    """A layer with a convolution, and perhaps a recurrence. Its argument ``attend`` is ``mix(rows [T, P]) -> [T,
    …]``.
    """

    def __init__(self, own: Any, plan: LayerPlan) -> None:
        mixer = plan.attention
        assert isinstance(mixer, MixerPlan)
        inner: Any = [own.get_submodule(name) for name in mixer.inner]
        super().__init__(own, plan, own.device)
        self.mixer = mixer
        self.inner_sizes = [part.out_features for part in inner]
        self.rows_proj = fuse_linear(inner)
        self.o_proj = own.get_submodule(mixer.output)
        for name, tensor in tensors_of(own, mixer).items():
            setattr(self, name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))

    @property
    def in_proj(self) -> Any:
        return self.rows_proj

    @property
    def weights(self) -> MixerWeights:
        """The weights in the form of the kernels."""
        return make_weights(self.mixer, {name: getattr(self, name) for name in _TENSORS})

    def attend(
        self, hidden: Tensor, residual: Tensor, angles: Sequence[Angles], attend: Attend
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        rows, carried = self.enter(hidden, residual)
        return attend(rows), carried


_TENSORS = ("taps", "taps_bias", "decay", "step_bias", "skip", "norm", "order")


def tensors_of(own: nn.Module, plan: MixerPlan) -> dict[str, Tensor | None]:
    """Return the kernels' tensors by name, from the model's own weights.

    Weights are in float32, which represents each of them exactly. ``order`` is the order of the columns of a row.
    """
    convolution: Any = own.get_submodule(plan.convolution)
    tensors: dict[str, Tensor | None] = {
        "taps": convolution.weight.detach()[:, 0].T.float().contiguous(),
        "taps_bias": None if convolution.bias is None else convolution.bias.detach().float(),
        "norm": own.get_parameter(f"{plan.norm}.weight").detach().float() if plan.norm else None,
        "order": _order_of(plan).to(convolution.weight.device) if plan.by_groups else None,
    }
    for name in ("decay", "step_bias", "skip"):
        path = getattr(plan, name)
        tensors[name] = own.get_parameter(path).detach().float() if path else None
    return tensors


def _order_of(plan: MixerPlan) -> Tensor:
    """Return the columns of rows computed group by group, in the order that makes each part contiguous; ``[P]``."""
    of_group = plan.num_heads // plan.num_groups
    sizes = [plan.key_dim, plan.key_dim, of_group * plan.head_dim, of_group * plan.head_dim]
    first = torch.arange(plan.num_groups * sum(sizes))
    second = len(first) + torch.arange(2 * plan.num_heads)
    parts = (*first.view(plan.num_groups, -1).split(sizes, 1), *second.view(plan.num_groups, -1).split(of_group, 1))
    return torch.cat([part.flatten() for part in parts])


def make_weights(plan: MixerPlan, tensors: dict[str, Any]) -> MixerWeights:
    """Return the kernels' weights for ``plan`` with the tensors of ``tensors_of``."""
    return MixerWeights(
        kind=plan.kind,
        values_at=plan.values_at,
        gate_at=plan.gate_at,
        strength_at=plan.strength_at,
        step_at=plan.step_at,
        num_heads=plan.num_heads,
        num_groups=plan.num_groups,
        head_dim=plan.head_dim,
        key_dim=plan.key_dim,
        norm_size=plan.norm_size,
        gates_first=plan.gates_first,
        eps=plan.eps,
        smallest_step=plan.smallest_step,
        **tensors,
    )


def mix_nothing(rows: Tensor, *, num_outputs: int) -> Tensor:
    """Return zeros in the shape of ``mix``, to measure the rest of a forward."""
    return rows.new_zeros(len(rows), num_outputs)


class LayerStates:
    """The states of all layers that keep some.

    Args:
        layers: their weights.
        dtype: of the model.
    """

    def __init__(self, layers: Sequence[MixerWeights], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._layers = layers
        self.states: list[MixerState] = []
        self._current: NDArray[np.int64] = np.zeros(0, np.int64)
        self._written: NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def bytes_per_request(self) -> int:
        """Bytes of a slot, over all layers."""
        states = (MixerState.allocate(layer, 2, self._dtype, torch.device("meta")) for layer in self._layers)
        return sum(state.recent.nbytes + state.states.nbytes for state in states)

    def allocate(self, num_slots: int, device: torch.device) -> None:
        """Allocate states for ``num_slots`` requests, and drop earlier ones."""
        self.states = []  # release the earlier ones first
        self.states = [MixerState.allocate(layer, 2 * num_slots, self._dtype, device) for layer in self._layers]
        self._current = np.zeros(num_slots, np.int64)
        self._written = np.zeros(0, np.int64)

    def begin(self, step: ModelInput) -> MixingBatch:
        """Return where the requests of ``step`` have their states, and where the next ones are written."""
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
        """Make the states that the last step wrote the current ones of its requests."""
        self._current[self._written] ^= 1
        self._written = np.zeros(0, np.int64)

    def tensors(self) -> list[Tensor]:
        """Return all tensors, ``[2 * slots, …]`` each."""
        return [tensor for state in self.states for tensor in (state.recent, state.states)]
