"""Weights are moved in parts, by several threads, through buffers that are not written before they were read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.worker.models.placing import moving
from penstock.worker.models.placing.moving import move_parameters

BUFFER_BYTES = 48
CPU = torch.device("cpu")


class SlowBuffer:
    """Sends what it holds only when it is waited for, as late as a device may."""

    def __init__(self, device: torch.device) -> None:
        self.memory = np.zeros(BUFFER_BYTES, np.uint8)
        self._target: Tensor | None = None

    def start_copy(self, target: Tensor) -> None:
        """Begin to send."""
        assert self._target is None, "written before it was read"
        self._target = target

    def await_device(self) -> None:
        """Send."""
        if self._target is not None:
            self._target.copy_(torch.from_numpy(self.memory[: len(self._target)]))
        self._target = None


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "BUFFER_BYTES", BUFFER_BYTES)


def module_of(*tensors: Tensor) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(tensor, requires_grad=False) for tensor in tensors])


@pytest.mark.parametrize("is_inference", [False, True])
def test_all_bytes_of_all_parameters_are_copied(is_inference: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    module = module_of(
        torch.randn(7, 13, generator=generator),
        torch.randn(50, generator=generator).bfloat16(),
        torch.randint(-128, 127, (48,), generator=generator).to(torch.int8),
        torch.empty(0, 3),
        torch.tensor(2.5),
    )
    before = [(parameter, parameter.data.clone(), parameter.data_ptr()) for parameter in module]
    with torch.inference_mode(is_inference):
        move_parameters(module, CPU, SlowBuffer, num_threads=3)
    for (parameter, content, address), after in zip(before, module, strict=True):
        assert after is parameter
        assert torch.equal(after.data, content)
        assert after.dtype == content.dtype
        assert after.numel() == 0 or after.data_ptr() != address


def test_shared_parameters_stay_shared_and_strided_ones_stay() -> None:
    module = module_of(torch.randn(4, 4), torch.randn(4, 6).T)
    module.append(module[0])
    strided = module[1].data_ptr()
    move_parameters(module, CPU, SlowBuffer, num_threads=2)
    assert module[2] is module[0]
    assert module[1].data_ptr() == strided


def test_a_failed_copy_leaves_the_module_as_it_was() -> None:
    class FailingBuffer(SlowBuffer):
        def start_copy(self, target: Tensor) -> None:
            raise RuntimeError("the device is lost")

    module = module_of(torch.randn(100))
    address = module[0].data_ptr()
    with pytest.raises(RuntimeError, match="the device is lost"):
        move_parameters(module, CPU, FailingBuffer, num_threads=1)
    assert module[0].data_ptr() == address
