"""Copies of a step's small arrays to where the model computes."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

# On a copy, what it was copied from.
_SOURCE = "penstock_source"


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return ``array`` as a tensor on ``device``, without waiting for it; on the CPU it is the same memory.

    From pinned memory, or the copy would wait for all that the device still has to do. Torch keeps pinned buffers, and
    gives one out again when the event behind its last copy has passed, however many steps are in flight.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    copy = tensor.pin_memory().to(device, non_blocking=True)
    setattr(copy, _SOURCE, array)
    return copy


def host_array(tensor: Tensor) -> NDArray[Any]:
    """Return the numbers of ``tensor`` on the host: without a wait for the device, where ``to_device`` made it.

    The array that was given to ``to_device`` must not have changed since.
    """
    source = getattr(tensor, _SOURCE, None)
    return tensor.detach().cpu().numpy() if source is None else source
