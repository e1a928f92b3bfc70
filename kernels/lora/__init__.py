"""Low-rank adapters: project to the rank of each token's adapter, then add its update to the layer's output.

Letters: ``NL`` adapters, ``R`` the largest rank among them; adapters of a smaller rank are padded with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import REFERENCE, KernelInputError, OnGpu, select
from . import reference

_GPU = f"{__package__}.gpu"
_SHRINK = {REFERENCE: reference.lora_shrink, "cuda": OnGpu(_GPU, "lora_shrink")}
_EXPAND = {REFERENCE: reference.lora_expand, "cuda": OnGpu(_GPU, "lora_expand")}


def lora_shrink(inputs: Tensor, a: Tensor, token_lora: Tensor) -> Tensor:
    """Multiply each token by the first matrix of its adapter.

    Args:
        inputs: ``[T, K]``, last axis contiguous.
        a: ``[NL, R, K]``, dtype of ``inputs``, last axis contiguous.
        token_lora: ``[T]`` int32 or int64, below ``NL``; negative for none.

    Returns:
        ``[T, R]``, float32; 0 for a token without an adapter. The bits of a row do not depend on the other rows, as
        long as ``T / NL`` leads to the same block size (``grouped_linear``).

    Raises:
        KernelInputError: a shape, dtype or stride above does not hold.

    Cost: ``2 * T * R * K`` FLOP; memory bound by ``T * K + NL * R * K`` elements, counting adapters that occur. On a
    GPU sums over ``K`` are split, so that a few tokens keep it busy, and the parts are added in a fixed order.
    Source: Hu et al. 2021 (arXiv:2106.09685); Chen et al. 2023 (arXiv:2310.18547) for many adapters in a batch.
    """
    _check_product(inputs, a, token_lora, "inputs", "a")
    if a.dtype != inputs.dtype:
        raise KernelInputError(f"a must be {inputs.dtype}, got {a.dtype}")
    return select(_SHRINK, inputs.device, inputs.dtype)(inputs, a, token_lora)


def lora_expand(inputs: Tensor, b: Tensor, token_lora: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
    """Multiply the result of ``lora_shrink`` by the second matrix of each adapter, and add it to ``out``, in place.

    Args:
        inputs: ``[T, R]``, float32, last axis contiguous.
        b: ``[NL, N, R]``, dtype of ``out``, last axis contiguous.
        token_lora: ``[T]`` int32 or int64, below ``NL``; negative for none.
        out: ``[T, N]``, last axis contiguous, so it may be a slice of a fused projection. **Mutated**; rows of tokens
            without an adapter are neither read nor written.
        scale: factor on the update, for all adapters; an adapter's own scale must be part of its ``b``.

    ``inputs`` are rounded to the dtype of ``out``. Sums are in float32, added to ``out`` and rounded once. The bits of
    a row do not depend on the other rows, as for ``lora_shrink``.

    Raises:
        KernelInputError: a shape, dtype or stride above does not hold.

    Cost: ``2 * T * N * R`` FLOP; memory bound by ``2 * T * N + NL * N * R`` elements, counting adapters that occur.
    Source: as ``lora_shrink``.
    """
    _check_product(inputs, b, token_lora, "inputs", "b")
    if out.shape != (len(inputs), b.shape[1]) or out.dtype != b.dtype or out.stride(1) != 1:
        actual = f"{tuple(out.shape)} {out.dtype} with strides {out.stride()}"
        raise KernelInputError(f"out must be {(len(inputs), b.shape[1])} {b.dtype}, rows contiguous, got {actual}")
    if inputs.dtype != torch.float32:
        raise KernelInputError(f"inputs must be float32, got {inputs.dtype}")
    select(_EXPAND, out.device, out.dtype)(inputs, b, token_lora, out, scale)


def _check_product(inputs: Tensor, matrices: Tensor, token_lora: Tensor, inputs_name: str, name: str) -> None:
    if inputs.ndim != 2 or matrices.ndim != 3 or matrices.shape[2] != inputs.shape[1]:
        actual = f"{tuple(inputs.shape)} and {tuple(matrices.shape)}"
        raise KernelInputError(f"{inputs_name} and {name} must be [T, K] and [NL, N, K], got {actual}")
    if inputs.stride(1) != 1 or matrices.stride(2) != 1:
        raise KernelInputError(f"the last axis of {inputs_name} and {name} must be contiguous")
    if token_lora.shape != inputs.shape[:1] or token_lora.dtype not in (torch.int32, torch.int64):
        actual = f"{tuple(token_lora.shape)} {token_lora.dtype}"
        raise KernelInputError(f"token_lora must be [{len(inputs)}] int32 or int64, got {actual}")
