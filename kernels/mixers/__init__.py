"""Layers that keep a recurrent state per request instead of keys and values.

Such a layer projects its input, mixes each token with the earlier tokens of its request, and projects the result. This
package computes the middle part: a short causal convolution, in some kinds followed by a recurrence with a matrix per
head as its state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import REFERENCE, KernelInputError, select
from ..native import library
from . import native, reference
from .weights import LANES, MixerKind, MixerState, MixerStruct, MixerWeights, MixingBatch

__all__ = ["LANES", "MixerKind", "MixerState", "MixerStruct", "MixerWeights", "MixingBatch", "has_kernel", "mix"]

_MAX_DIM = 512
_IMPLEMENTATIONS = {REFERENCE: reference.mix, "cpu": native.mix}


def has_kernel(weights: MixerWeights, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a kernel other than the reference supports these weights."""
    sizes = (weights.head_dim, weights.key_dim)
    return (
        device.type == "cpu"
        and library("mix", dtype) is not None
        and weights.head_dim % LANES == 0
        and max(sizes) <= _MAX_DIM
    )


def mix(rows: Tensor, weights: MixerWeights, state: MixerState, batch: MixingBatch) -> Tensor:
    """Mix each packed token with the earlier tokens of its request.

    Args:
        rows: ``[T, P]``, contiguous, the output of the layer's projection.
        state: read and **written**, in the slots of ``batch``.

    Returns:
        ``[T, num_outputs]`` in the dtype of ``rows``. A token's bits do not depend on other requests. Without a
        ``smallest_step`` they do not depend on how a request is cut into steps either.

    Raises:
        KernelInputError: shapes do not agree.

    Cost: ``6 * key_dim * head_dim`` operations per token and head; decodes are memory bound by reading and
    writing states.
    """
    num_slots = len(state.recent)
    if rows.ndim != 2 or not rows.is_contiguous() or int(batch.query_lens.sum()) != len(rows):
        raise KernelInputError(f"rows must be contiguous [{int(batch.query_lens.sum())}, P], got {tuple(rows.shape)}")
    if weights.order is not None and len(weights.order) != rows.shape[1]:
        raise KernelInputError(f"order must have the {rows.shape[1]} columns of rows, got {len(weights.order)}")
    if len(batch.reads) and (int(batch.writes.min()) < 0 or int(batch.writes.max()) >= num_slots):
        raise KernelInputError(f"writes must be slots from 0 to {num_slots - 1}, got {batch.writes.tolist()}")
    return select(_IMPLEMENTATIONS, rows.device, rows.dtype)(rows, weights, state, batch)
