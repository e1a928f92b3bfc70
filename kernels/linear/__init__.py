"""Products with a weight, float32 or bfloat16, that was laid out once for the processor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import KernelInputError
from ..native import library

_PANEL = 64
_GROUP_BYTES = 4


def can_pack(weight: Tensor) -> bool:
    """Whether the compiled library is there and the weight suits it."""
    is_known = weight.device.type == "cpu" and library("linear", weight.dtype) is not None
    return is_known and weight.shape[1] % _group(weight.dtype) == 0


def pack_weight(weight: Tensor) -> Tensor:
    """Lay out a weight ``[N, K]`` in panels of 64 outputs, ``[P, K / G, 64, G]`` with ``G`` inputs in 4 bytes.

    Outputs beyond ``N`` are zero.

    Raises:
        KernelInputError: ``can_pack`` says no.
    """
    function = library("pack_linear", weight.dtype)
    if function is None or not can_pack(weight):
        raise KernelInputError(f"a weight {weight.dtype} {tuple(weight.shape)} cannot be packed here")
    num_outputs, num_inputs = weight.shape
    group = _group(weight.dtype)
    source = weight.detach().contiguous()
    packed = torch.empty((-(-num_outputs // _PANEL), num_inputs // group, _PANEL, group), dtype=weight.dtype)
    function(source.data_ptr(), packed.data_ptr(), num_outputs, num_inputs)
    return packed


def unpack_weight(packed: Tensor, num_outputs: int) -> Tensor:
    """The weight ``[N, K]`` that ``pack_weight`` was given."""
    return packed.permute(0, 2, 1, 3).reshape(-1, packed.shape[1] * packed.shape[3])[:num_outputs]


def pack_bias(bias: Tensor) -> Tensor:
    """A bias ``[N]`` in float32, as long as the panels of its weight."""
    packed = torch.zeros(-(-len(bias) // _PANEL) * _PANEL)
    packed[: len(bias)] = bias.detach()
    return packed


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    """Return ``inputs @ weight.T + bias``, summed in float32 and rounded once.

    Args:
        inputs: ``[..., K]``, of the weight's dtype.
        weight: of ``pack_weight``.
        bias: of ``pack_bias``.
        num_outputs: ``N``.

    Returns:
        ``[..., N]``. A row has the same bits whatever the other rows are.

    Raises:
        KernelInputError: a shape or dtype above does not hold, or the library was unloaded.

    Cost: for few rows memory bound, the bytes of the weight; else ``2 * T * N * K`` operations.
    """
    function = library("linear", weight.dtype)
    num_inputs = weight.shape[1] * weight.shape[3]
    if inputs.dtype != weight.dtype or inputs.shape[-1] != num_inputs or function is None:
        raise KernelInputError(
            f"inputs must be {weight.dtype} [..., {num_inputs}], got {inputs.dtype} {tuple(inputs.shape)}"
        )
    rows = inputs.reshape(-1, num_inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty((*inputs.shape[:-1], num_outputs), dtype=weight.dtype)
    function(
        *(rows.data_ptr(), rows.stride(0), weight.data_ptr(), None if bias is None else bias.data_ptr()),
        *(out.data_ptr(), rows.shape[0], num_inputs, num_outputs),
    )
    return out


def _group(dtype: torch.dtype) -> int:
    """Inputs that the processor takes at once."""
    return _GROUP_BYTES // dtype.itemsize
