"""Linear layers with weights of one byte per number, for a GPU. Those for the CPU are in ``packed_linear.py``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....kernels.quantized_linear import QuantizedWeight, dequantize_weight, quantize_weight, quantized_linear
from .packed_linear import MIN_QUANTIZED_OUTPUTS, replace_linear_layers

WEIGHT_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class QuantizedLinear(nn.Module):
    """Approximates a linear layer. Its tensors are parameters, so they move and sleep as weights do."""

    def __init__(self, plain: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        bias = None if plain.bias is None else plain.bias.detach()
        quantized = quantize_weight(plain.weight.detach(), dtype, bias)
        self._values = nn.Parameter(quantized.values, requires_grad=False)
        self._scales = nn.Parameter(quantized.scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._dtype = plain.weight.dtype
        self.in_features, self.out_features = plain.in_features, plain.out_features

    @property
    def weight(self) -> Tensor:
        """A copy in the original dtype: the code of some models computes with it."""
        return dequantize_weight(QuantizedWeight(self._values, self._scales)).to(self._dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        out = quantized_linear(rows, QuantizedWeight(self._values, self._scales, self.bias))
        return out.unflatten(0, inputs.shape[:-1])


def quantize_linear_layers(model: nn.Module, quantization: str) -> int:
    """Replace the linear layers of ``model`` by ones in bytes, of a dtype in ``WEIGHT_DTYPES``; return their number."""
    dtype = WEIGHT_DTYPES[quantization]
    return replace_linear_layers(
        model, lambda _, plain: QuantizedLinear(plain, dtype) if plain.out_features >= MIN_QUANTIZED_OUTPUTS else None
    )
