"""What all kernel tests share: the table of tolerances."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from penstock.kernels import native

# (rtol, atol) against a float64 result of the same inputs; the same for every kernel, device and shape.
TOLERANCES = {
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (2e-3, 2e-3),
}


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """Compare a result with its float64 truth under the tolerance of the result's dtype."""

    def compare(actual: Tensor, expected: Tensor) -> None:
        rtol, atol = TOLERANCES[actual.dtype]
        torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)

    return compare


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where Triton kernels run: on the GPU, or where none is on the CPU, by Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def references() -> Iterator[None]:
    """No compiled kernels, though an engine of this process may have loaded them."""
    was_loaded = native.is_loaded()
    native.unload()
    yield
    if was_loaded:
        native.load()
