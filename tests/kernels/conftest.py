"""Fixtures of all kernel tests: comparison with the truth, the device, and the references."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from penstock.kernels import native
from penstock.ops.lab.kernels import tolerances

from ..native_library import native_as_before, references

__all__ = ["references"]


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """Compare a result with its float64 truth under the tolerance of the result's dtype."""
    return tolerances.assert_close


@pytest.fixture
def compiled() -> Iterator[None]:
    """The library in use, compiled once for all tests and engines of this machine."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("needs a C++ compiler")
    with native_as_before():
        assert native.load() is None
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device of Triton kernels: the GPU, or without one the CPU, where Triton's interpreter runs them."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def _interpreted_kernels(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        yield
        return
    from .interpreter import interpreted  # imports Triton

    with interpreted():
        yield


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill all uninitialized tensors of torch with NaN, or with the largest number for integers."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
