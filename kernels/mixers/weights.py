"""What a layer with a state is made of, where its states are, and whose tokens a step has."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from .structs import MixerStruct

# Of a head's values.
LANES = 16


class MixerKind(IntEnum):
    """Kind of a mixer, with the values of ``kernels/native/mixers.h``. The latter two end with a gated normalisation.

    ``CONVOLUTION``: the product of two parts of a row is convolved, then multiplied by a third part.
    ``DELTA_RULE``: the convolved row holds queries, keys and values. A token's value replaces the value that the state
    holds for its key (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464).
    ``SCAN``: the convolved row holds values, keys and queries. Values are added to the state (Dao and Gu 2024,
    arXiv:2405.21060).
    """

    CONVOLUTION = 0
    DELTA_RULE = 1
    SCAN = 2


@dataclass(frozen=True)
class MixerWeights:
    """One layer's. All tensors are float32, but for ``order``.

    Args:
        taps, taps_bias: of the convolution, ``[num taps, C]``, the last one of the token itself, and ``[C]`` or None.
        num_heads, num_groups, head_dim, key_dim: the state is ``[num_heads, key_dim, head_dim]``; heads of a group have
            the same keys and queries. 0 of a convolution.
        values_at, gate_at: columns of the projection from which on the convolution is given ``C`` numbers, and from
            which on is what opens for the result.
        strength_at: where the other factor of a convolution's input is, or a delta rule's strengths, ``[num_heads]``.
        step_at: where the steps of a recurrence are, ``[num_heads]``.
        decay, step_bias, skip: ``[num_heads]``: the state decays by ``exp(-exp(decay) * softplus(step + step_bias))``;
            of a scan, ``skip`` times the value is added to what is found.
        norm: ``[head_dim]`` or ``[num_heads * head_dim]``; ``norm_size`` columns are normalised together.
        gates_first: before the normalisation.
        smallest_step: of a scan's tokens, but for one that follows a state alone: so transformers has it.
        order: ``[P]`` int64, columns of the projection in the order in which places count; None as they come.
    """

    kind: MixerKind
    taps: Tensor
    taps_bias: Tensor | None
    values_at: int
    gate_at: int
    strength_at: int = 0
    step_at: int = 0
    num_heads: int = 0
    num_groups: int = 0
    head_dim: int = 0
    key_dim: int = 0
    decay: Tensor | None = None
    step_bias: Tensor | None = None
    skip: Tensor | None = None
    norm: Tensor | None = None
    norm_size: int = 1
    gates_first: bool = False
    eps: float = 0.0
    smallest_step: float = 0.0
    order: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        return self.taps.shape[1] if self.kind == MixerKind.CONVOLUTION else self.num_heads * self.head_dim

    def struct(self) -> MixerStruct:
        """As the compiled library takes it, without a state."""
        pointers = (self.taps, self.taps_bias, self.decay, self.step_bias, self.skip, self.norm, self.order)
        return MixerStruct(
            *(self.kind, *self.taps.shape),
            *(self.num_heads, self.num_groups, self.head_dim, self.key_dim),
            *(self.values_at, self.gate_at, self.strength_at, self.step_at),
            *(
                self.norm_size,
                1 if self.norm is None else len(self.norm),
                self.gates_first,
                self.eps,
                self.smallest_step,
            ),
            *(None if tensor is None else tensor.data_ptr() for tensor in pointers),
            *(None, None),
        )


@dataclass(frozen=True)
class MixerState:
    """Of all requests, in slots.

    Args:
        recent: ``[slots, num taps - 1, C]`` of the model's dtype, what the convolution was given last.
        states: ``[slots, num_heads, key_dim, head_dim]`` float32.
    """

    recent: Tensor
    states: Tensor

    @classmethod
    def of(cls, weights: MixerWeights, num_slots: int, dtype: torch.dtype, device: torch.device) -> MixerState:
        """Room for ``num_slots``."""
        num_taps, num_channels = weights.taps.shape
        shape = (num_slots, weights.num_heads, weights.key_dim, weights.head_dim)
        return cls(
            torch.zeros(num_slots, num_taps - 1, num_channels, dtype=dtype, device=device),
            torch.zeros(shape, device=device),
        )


@dataclass(frozen=True)
class MixingBatch:
    """The packed tokens of some requests.

    Args:
        query_lens: ``[B]`` int64, on the CPU.
        reads, writes: ``[B]`` int64, the slot that has a request's state before, negative for one that begins, and the
            one that is to have it afterwards; never the same.
    """

    query_lens: Tensor
    reads: Tensor
    writes: Tensor
