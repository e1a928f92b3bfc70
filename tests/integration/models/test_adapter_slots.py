"""Slots for adapters beside a model whose layers compute with them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from penstock.kernels import native
from penstock.worker.models.adapters.attach import attach_adapters
from penstock.worker.models.adapters.peft_folder import LayerMatrices
from penstock.worker.models.adapters.targets import layers_of, targets_of
from penstock.worker.models.forward import ForwardSettings
from penstock.worker.models.lean.forward import LeanForward

from ...native_library import native_as_before
from .lean_models import make_model, make_step

BLOCK_SIZE = 4


@pytest.fixture
def native_kernels() -> Iterator[None]:
    with native_as_before():
        assert native.load() is None
        yield


@torch.inference_mode()
def test_adapter_tensors_in_a_slot_live_as_long_as_the_model_uses_them(native_kernels: None) -> None:
    """The compiled library stores addresses, and the caller may have dropped its tensors."""
    forward = LeanForward(make_model("llama", torch.float32), ForwardSettings(max_model_len=64))
    slots = attach_adapters(forward, "llama", num_slots=1, max_rank=4, is_deterministic=False)
    matrices = {
        layer: LayerMatrices(torch.ones(4, num_inputs), torch.ones(num_outputs, 4))
        for layer, (num_inputs, num_outputs) in layers_of(targets_of(forward.network)).items()
    }
    slots.assign(0, slots.prepare(matrices))
    slots.flush()
    forward.allocate(8, BLOCK_SIZE, 1, torch.device("cpu"))

    def run() -> torch.Tensor:
        step = make_step([(0, 6)], [0], torch.arange(8)[None], torch.arange(8)[None], BLOCK_SIZE)
        step.token_lora = torch.zeros(6, dtype=torch.int64)
        return forward.run(step)

    expected = run()
    del slots
    gc.collect()
    # What was freed is written over.
    others = [torch.full((size,), torch.nan) for size in range(16, 4096, 16) for _ in range(4)]
    torch.testing.assert_close(run(), expected, rtol=0, atol=0)
    assert others
