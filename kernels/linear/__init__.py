"""Products with a weight that was laid out once for the processor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import KernelInputError
from ..native import library

_PANEL = 64


class PackedWeight:
    """A bfloat16 weight ``[N, K]``, and a bias ``[N]`` or None, laid out for ``linear`` on this processor.

    Raises:
        KernelInputError: ``can_pack`` says no.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        pack = library("pack_linear")
        if pack is None or not can_pack(weight):
            raise KernelInputError(f"a weight {weight.dtype} {tuple(weight.shape)} cannot be packed here")
        self.num_outputs, self.num_inputs = weight.shape
        num_padded = -(-self.num_outputs // _PANEL) * _PANEL
        self.data = torch.empty(num_padded * self.num_inputs, dtype=torch.bfloat16)
        source = weight.detach().contiguous()
        pack(source.data_ptr(), self.data.data_ptr(), self.num_outputs, self.num_inputs)
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = torch.zeros(num_padded)
            self.bias[: self.num_outputs] = bias.detach()


def can_pack(weight: Tensor) -> bool:
    """Whether the compiled library is there, the processor has its instruction, and the weight suits it."""
    has_linear = library("has_bfloat16_linear")
    is_suited = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
    return is_suited and has_linear is not None and bool(has_linear())


def linear(inputs: Tensor, weight: PackedWeight) -> Tensor:
    """Return ``inputs @ weight.T + bias``, summed in float32 and rounded once.

    Args:
        inputs: ``[..., K]`` bfloat16.

    Returns:
        ``[..., N]`` bfloat16. A row has the same bits whatever the other rows are.

    Raises:
        KernelInputError: a shape or dtype above does not hold, or the library was unloaded.

    Cost: for few rows memory bound, ``N * K * 2`` bytes; else ``2 * T * N * K`` operations.
    """
    function = library("linear")
    if inputs.dtype != torch.bfloat16 or inputs.shape[-1] != weight.num_inputs or function is None:
        raise KernelInputError(
            f"inputs must be bfloat16 [..., {weight.num_inputs}], got {inputs.dtype} {tuple(inputs.shape)}"
        )
    rows = inputs.reshape(-1, weight.num_inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty((*inputs.shape[:-1], weight.num_outputs), dtype=torch.bfloat16)
    bias = None if weight.bias is None else weight.bias.data_ptr()
    function(
        *(rows.data_ptr(), rows.stride(0), weight.data.data_ptr(), bias, out.data_ptr()),
        *(rows.shape[0], weight.num_inputs, weight.num_outputs),
    )
    return out
