"""Weights and states of a layer with a mixer, the requests of a step, and structs of ``native/decoder/mixers.h``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

# head_dim must be a multiple of it.
LANES = 16
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class MixerKind(IntEnum):
    """Kind of a mixer, with the values of ``native/decoder/mixers.h``. The latter two end with a gated normalisation.

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
    """Weights of one layer. All tensors are float32, except ``order``.

    Args:
        taps, taps_bias: weights of the convolution, ``[num taps, C]``, the last tap for the token itself; and its bias,
            ``[C]`` or None.
        num_heads, num_groups, head_dim, key_dim: the state is ``[num_heads, key_dim, head_dim]``; heads of a group have
            the same keys and queries. 0 for a convolution.
        values_at: first of the ``C`` columns of the projection that the convolution reads.
        gate_at: first column of the gates.
        strength_at: first column of the other factor of a convolution's input, or of a delta rule's strengths,
            ``[num_heads]``.
        step_at: first column of the steps of a recurrence, ``[num_heads]``.
        decay, step_bias, skip: ``[num_heads]``. The state decays by ``exp(-exp(decay) * softplus(step + step_bias))``.
            A scan adds ``skip`` times the value to its output.
        norm: ``[head_dim]`` or ``[num_heads * head_dim]``; ``norm_size`` columns are normalised together.
        gates_first: apply the gates before the normalisation.
        smallest_step: lower bound of a scan's steps, except for a single token that follows a state, as in
            transformers.
        order: ``[P]`` int64, permutation of the projection's columns that the columns above refer to; None for the
            identity.
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
        """Return the struct for the compiled library, without the addresses of a state."""
        num_taps, num_channels = self.taps.shape
        tensors = ("taps", "taps_bias", "decay", "step_bias", "skip", "norm", "order")
        addresses = {name: None if (tensor := getattr(self, name)) is None else tensor.data_ptr() for name in tensors}
        return MixerStruct(
            kind=self.kind,
            num_taps=num_taps,
            num_channels=num_channels,
            num_heads=self.num_heads,
            num_groups=self.num_groups,
            head_dim=self.head_dim,
            key_dim=self.key_dim,
            values_at=self.values_at,
            gate_at=self.gate_at,
            strength_at=self.strength_at,
            step_at=self.step_at,
            norm_size=self.norm_size,
            norm_weights=1 if self.norm is None else len(self.norm),
            gates_first=self.gates_first,
            eps=self.eps,
            smallest_step=self.smallest_step,
            **addresses,
        )


@dataclass(frozen=True)
class MixerState:
    """States of all requests, in slots.

    Args:
        recent: ``[slots, num taps - 1, C]`` in the model's dtype, the latest inputs of the convolution.
        states: ``[slots, num_heads, key_dim, head_dim]`` float32.
    """

    recent: Tensor
    states: Tensor

    @classmethod
    def allocate(cls, weights: MixerWeights, num_slots: int, dtype: torch.dtype, device: torch.device) -> MixerState:
        """Return ``num_slots`` empty states."""
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
        reads: ``[B]`` int64, slot of each request's state before the step; negative for a new request.
        writes: ``[B]`` int64, slot of its state after the step; never the slot that it reads.
    """

    query_lens: Tensor
    reads: Tensor
    writes: Tensor


class MixerStruct(ctypes.Structure):
    _fields_ = (
        *((name, _INT) for name in ("kind", "num_taps", "num_channels")),
        *((name, _INT) for name in ("num_heads", "num_groups", "head_dim", "key_dim")),
        *((name, _INT) for name in ("values_at", "gate_at", "strength_at", "step_at")),
        *((name, _INT) for name in ("norm_size", "norm_weights", "gates_first")),
        *((name, _FLOAT) for name in ("eps", "smallest_step")),
        *((name, _POINTER) for name in ("taps", "taps_bias", "decay", "step_bias", "skip", "norm", "order")),
        *((name, _POINTER) for name in ("recent", "states")),
    )


class MixerStepStruct(ctypes.Structure):
    _fields_ = (
        *((name, _INT) for name in ("num_tokens", "num_requests")),
        *((name, _POINTER) for name in ("query_lens", "reads", "writes")),
    )
