"""What layers do that keep a state of each request in the place of keys and values.

A layer projects its input, mixes each token with what came before it of the same request, and projects what it finds.
The middle part is here: a short causal convolution, and behind it perhaps a recurrence, whose state is a matrix a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import REFERENCE, select
from ..errors import KernelInputError
from ..native import library
from . import native, reference
from .structs import MixerStruct
from .weights import LANES, MixerKind, MixerState, MixerWeights, MixingBatch

__all__ = ["LANES", "MixerKind", "MixerState", "MixerStruct", "MixerWeights", "MixingBatch", "has_kernel", "mix"]

_MAX_DIM = 512
_IMPLEMENTATIONS = {REFERENCE: reference.mix, "cpu": native.mix}


def has_kernel(weights: MixerWeights, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is more than a reference."""
    sizes = (weights.head_dim, weights.key_dim)
    return (
        device.type == "cpu"
        and library("mix", dtype) is not None
        and weights.head_dim % LANES == 0
        and max(sizes) <= _MAX_DIM
    )


def mix(rows: Tensor, weights: MixerWeights, state: MixerState, batch: MixingBatch) -> Tensor:
    """Mix packed tokens, each with those before it of its request.

    Args:
        rows: ``[T, P]``, contiguous, what the layer's projection makes.
        state: read and **written**, in the slots of ``batch``.

    Returns:
        ``[T, num_outputs]`` in the dtype of ``rows``. A token's bits do not depend on other requests, nor, without a
        ``smallest_step``, on how a request is cut into steps.

    Raises:
        KernelInputError: shapes do not agree.

    Cost: ``6 * key_dim * head_dim`` operations a token and head; for decodes memory bound, states read and written.
    """
    num_slots = len(state.recent)
    if rows.ndim != 2 or not rows.is_contiguous() or int(batch.query_lens.sum()) != len(rows):
        raise KernelInputError(f"rows must be contiguous [{int(batch.query_lens.sum())}, P], got {tuple(rows.shape)}")
    if weights.order is not None and len(weights.order) != rows.shape[1]:
        raise KernelInputError(f"order must have the {rows.shape[1]} columns of rows, got {len(weights.order)}")
    if len(batch.reads) and (int(batch.writes.min()) < 0 or int(batch.writes.max()) >= num_slots):
        raise KernelInputError(f"writes must be slots from 0 to {num_slots - 1}, got {batch.writes.tolist()}")
    return select(_IMPLEMENTATIONS, rows.device, rows.dtype)(rows, weights, state, batch)
