"""The allowed difference between a kernel's result and the truth: its reference on the same inputs in float64."""

from __future__ import annotations

import torch
from torch import Tensor

# (rtol, atol) by the dtype of the result; the same for every kernel, device and shape, in tests and in the benchmark.
TOLERANCES = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (2e-3, 2e-3),
    torch.float8_e4m3fn: (2**-3, 2**-9),
    torch.float8_e5m2: (2**-2, 2**-16),
}


def assert_close(actual: Tensor, truth: Tensor) -> None:
    """Compare ``actual`` with ``truth``, of any dtype; integers must be equal.

    Raises:
        AssertionError: the difference exceeds the tolerance; the message names the place and the difference.
    """
    rtol, atol = TOLERANCES.get(actual.dtype, (0.0, 0.0))
    torch.testing.assert_close(actual.double(), truth.double(), rtol=rtol, atol=atol)
