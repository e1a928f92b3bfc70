"""Products of rows with the weight of their group: what experts and adapters have in common.

Letters: ``M`` entries, each a row of inputs with a group; ``G`` groups; ``K`` inputs and ``N`` outputs of a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import REFERENCE, OnGpu, select
from ..errors import KernelInputError
from . import reference

_INTEGERS = (torch.int32, torch.int64)
_IMPLEMENTATIONS = {REFERENCE: reference.grouped_linear, "cuda": OnGpu(f"{__package__}.gpu", "grouped_linear")}


def grouped_linear(inputs: Tensor, weight: Tensor, group_ids: Tensor) -> Tensor:
    """Multiply each token's row by the weights of its groups.

    Args:
        inputs: ``[T, K]``, last axis contiguous.
        weight: ``[G, N, K]``, dtype of ``inputs``, last axis contiguous.
        group_ids: ``[T, J]`` int32 or int64, the groups of each token: below ``G``; negative is none.

    Returns:
        ``[T, J, N]``, dtype of ``inputs``, summed in float32 and rounded once; 0 where there is no group. A row has the
        same bits whatever the other rows and their groups are, as long as ``T * J / G`` leads to the same block size
        (16, 32, 64 or 128 rows).

    Raises:
        KernelInputError: a shape, dtype or stride above does not hold.

    Cost: ``2 * T * J * N * K`` FLOP, by blocks of rows of one group; for few rows memory bound, the weights of the
    groups that occur. On a GPU how many rows a group has is never read back to the host.
    Source: Gale et al. 2022 (arXiv:2211.15841) for blocks of one group each.
    """
    if inputs.ndim != 2 or weight.ndim != 3 or weight.shape[2] != inputs.shape[1] or weight.dtype != inputs.dtype:
        found = f"{tuple(inputs.shape)} {inputs.dtype} and {tuple(weight.shape)} {weight.dtype}"
        raise KernelInputError(f"inputs and weight must be [T, K] and [G, N, K] of one dtype, got {found}")
    if inputs.stride(1) != 1 or weight.stride(2) != 1:
        raise KernelInputError("the last axis of inputs and weight must be contiguous")
    if group_ids.shape[:1] != inputs.shape[:1] or group_ids.ndim != 2 or group_ids.dtype not in _INTEGERS:
        found = f"{tuple(group_ids.shape)} {group_ids.dtype}"
        raise KernelInputError(f"group_ids must be [{len(inputs)}, J] int32 or int64, got {found}")
    return select(_IMPLEMENTATIONS, inputs.device, inputs.dtype)(inputs, weight, group_ids)
