"""Products of rows with the weight of their group, used for experts and adapters.

Letters: ``M`` entries, each a row of inputs and a group; ``G`` groups; ``K`` inputs and ``N`` outputs of a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import REFERENCE, KernelInputError, OnGpu, select
from . import reference

_INTEGERS = (torch.int32, torch.int64)
_IMPLEMENTATIONS = {REFERENCE: reference.grouped_linear, "cuda": OnGpu(f"{__package__}.gpu", "grouped_linear")}


def grouped_linear(inputs: Tensor, weight: Tensor, group_ids: Tensor) -> Tensor:
    """Multiply each token's row by the weights of its groups.

    Args:
        inputs: ``[T, K]``, last axis contiguous.
        weight: ``[G, N, K]``, dtype of ``inputs``, last axis contiguous.
        group_ids: ``[T, J]`` int32 or int64, the groups of each token, below ``G``; negative for none.

    Returns:
        ``[T, J, N]``, dtype of ``inputs``, summed in float32 and rounded once; 0 for an entry without a group. The bits
        of a row do not depend on other rows and their groups, as long as ``T * J / G`` leads to the same block size
        (16, 32, 64 or 128 rows).

    Raises:
        KernelInputError: a shape, dtype or stride above does not hold.

    Cost: ``2 * T * J * N * K`` FLOP, in blocks of rows of one group; for few rows memory bound by the weights of the
    groups that occur. On a GPU the sizes of groups are never read back to the host.
    Source: Gale et al. 2022 (arXiv:2211.15841) for blocks of one group each.
    """
    if inputs.ndim != 2 or weight.ndim != 3 or weight.shape[2] != inputs.shape[1] or weight.dtype != inputs.dtype:
        actual = f"{tuple(inputs.shape)} {inputs.dtype} and {tuple(weight.shape)} {weight.dtype}"
        raise KernelInputError(f"inputs and weight must be [T, K] and [G, N, K] of one dtype, got {actual}")
    if inputs.stride(1) != 1 or weight.stride(2) != 1:
        raise KernelInputError("the last axis of inputs and weight must be contiguous")
    if group_ids.shape[:1] != inputs.shape[:1] or group_ids.ndim != 2 or group_ids.dtype not in _INTEGERS:
        actual = f"{tuple(group_ids.shape)} {group_ids.dtype}"
        raise KernelInputError(f"group_ids must be [{len(inputs)}, J] int32 or int64, got {actual}")
    return select(_IMPLEMENTATIONS, inputs.device, inputs.dtype)(inputs, weight, group_ids)
