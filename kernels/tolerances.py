"""How far a kernel's result may be from the truth, which is its reference in float64 of the same inputs."""

from __future__ import annotations

import torch
from torch import Tensor

# (rtol, atol) by the dtype of the result; the same for every kernel, device and shape, in tests and before timing.
TOLERANCES = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (2e-3, 2e-3),
    torch.float8_e4m3fn: (2**-3, 2**-9),
    torch.float8_e5m2: (2**-2, 2**-16),
}


def assert_close(actual: Tensor, truth: Tensor) -> None:
    """Compare with ``truth``, of any dtype; integers must be equal.

    Raises:
        AssertionError: it is farther away than its dtype allows; the message tells where and by how much.
    """
    rtol, atol = TOLERANCES.get(actual.dtype, (0.0, 0.0))
    torch.testing.assert_close(actual.double(), truth.double(), rtol=rtol, atol=atol)
