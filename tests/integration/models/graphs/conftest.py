"""The device of captured forwards, and what records their graphs."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import paged_attention, rotary

from .harness import Recording


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cpu":
        if torch.cuda.is_available():
            pytest.skip("Triton compiles for the GPU here")
        from penstock.kernels.paged_attention import gpu as attention_on_gpu
        from penstock.kernels.rotary import gpu as rotary_on_gpu

        monkeypatch.setitem(paged_attention._IMPLEMENTATIONS, "cpu", attention_on_gpu.paged_attention)
        monkeypatch.setitem(rotary._STORE_IMPLEMENTATIONS, "cpu", rotary_on_gpu.rotary_and_store)
    return torch.device(request.param)


@pytest.fixture
def recording() -> Recording:
    return Recording()
