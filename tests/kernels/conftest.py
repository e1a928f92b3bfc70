"""What all kernel tests share: the comparison with the truth, the device, the references alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from penstock.kernels import native, tolerances


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """Compare a result with its float64 truth under the tolerance of the result's dtype."""
    return tolerances.assert_close


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
