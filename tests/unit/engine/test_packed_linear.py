"""Packed linear layers against plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn

from penstock.kernels import native
from penstock.kernels.linear import can_pack
from penstock.worker.models.placing.packed_linear import OneDnnLinear, OwnPackedLinear, pack_linear_layers

from ...native_library import native_as_before

BFLOAT16_WEIGHT = torch.zeros(2, 2, dtype=torch.bfloat16)


@pytest.fixture(params=["compiled", "plain"])
def has_own_kernel(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether layers go through our kernel."""
    with native_as_before():
        native.unload()
        if request.param == "compiled":
            native.load()
        if request.param == "compiled" and not can_pack(BFLOAT16_WEIGHT):
            pytest.skip("needs a C++ compiler")
        yield request.param == "compiled"


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_same_result_as_the_layer_it_replaces(
    dtype: torch.dtype, tolerance: float, has_bias: bool, has_own_kernel: bool
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(600, 401, bias=has_bias, dtype=dtype), nn.Linear(401, 5, dtype=dtype))
    packed = nn.Sequential(*plain)
    # The second is too small to gain by oneDNN, and has an odd number of inputs, which ours takes in pairs of bfloat16.
    has_onednn = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()  # not on every processor
    expected = (OwnPackedLinear if has_own_kernel else OneDnnLinear) if has_own_kernel or has_onednn else nn.Linear
    assert pack_linear_layers(packed) == (2 if has_own_kernel and dtype == torch.float32 else expected is not nn.Linear)
    assert type(packed[0]) is expected
    for layer, own in zip(packed, plain, strict=True):
        assert torch.equal(cast(Any, layer).weight, cast(Any, own).weight)
    with torch.inference_mode():
        for num_tokens in (1, 7, 130):
            inputs = torch.randn(1, num_tokens, 1200).to(dtype)[..., ::2]
            torch.testing.assert_close(packed(inputs), plain(inputs), rtol=tolerance, atol=tolerance)
