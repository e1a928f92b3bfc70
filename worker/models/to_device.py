"""Copies of a step's small arrays to where the model computes."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return ``array`` as a tensor on ``device``, without waiting for it; on the CPU it is the same memory.

    From pinned memory, or the copy would wait for all that the device still has to do. Torch keeps pinned buffers, and
    gives one out again when the event behind its last copy has passed, however many steps are in flight.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
