"""Packed linear layers against plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.worker.models.packed_linear import PackedLinear, pack_linear_layers


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_same_result_as_the_layer_it_replaces(dtype: torch.dtype, tolerance: float, has_bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(600, 401, bias=has_bias, dtype=dtype), nn.Linear(401, 5, dtype=dtype))
    packed = nn.Sequential(*plain)
    assert pack_linear_layers(packed) == 1, "the second layer is too small to gain"
    assert isinstance(packed[0], PackedLinear)
    with torch.inference_mode():
        for num_tokens in (1, 7, 130):
            inputs = torch.randn(1, num_tokens, 1200).to(dtype)[..., ::2]
            torch.testing.assert_close(packed(inputs), plain(inputs), rtol=tolerance, atol=tolerance)
