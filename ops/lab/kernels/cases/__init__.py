"""Rows of the benchmark: a module for each package of ``kernels``, and the values that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel on inputs of one shape.

    Functions take ``inputs`` and return a tensor or a tuple. Each comparison passes copies, so a function may
    overwrite its inputs. Tensors that are only read, or too large to copy, can be closed over instead.

    Args:
        shape: in the letters of ``kernels/__init__.py``, e.g. ``"T=64 E=4096"``; begins with the name of the operation
            where a package has several.
        dtype: dtype of the inputs, shown in the row.
        inputs: contiguous tensors. ``run`` itself slices a larger tensor.
        run: the kernel's wrapper.
        truth: the reference; gets the floating inputs as float64.
        rivals: torch's own implementations of the same result, by name.
        num_bytes: bytes read and written, each counted once.
        num_flop: multiplications and additions of the products; 0 for a kernel that only moves memory.
    """

    shape: str
    dtype: torch.dtype
    inputs: tuple[Tensor, ...]
    run: Callable[..., Any]
    truth: Callable[..., Any]
    rivals: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    num_bytes: int
    num_flop: int = 0


class Setting:
    """Device of the cases, and random tensors on it from a fixed seed.

    Args:
        device: device of the tensors.
        is_quick: build the fewest cases that still run every kernel.
    """

    def __init__(self, device: torch.device, *, is_quick: bool = False) -> None:
        self.device = device
        self.is_quick = is_quick
        self.generator = torch.Generator(device).manual_seed(SEED)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def choose(self, *, on_gpu: Sequence[T], on_cpu: Sequence[T]) -> list[T]:
        """Return the sizes for this device; only the last one in a quick run."""
        chosen = list(on_gpu if self.is_gpu else on_cpu)
        return chosen[-1:] if self.is_quick else chosen

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return normally distributed numbers."""
        return torch.randn(*shape, dtype=torch.float32, device=self.device, generator=self.generator).to(dtype)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return random integers from 0 to ``high - 1``."""
        return torch.randint(high, shape, dtype=dtype, device=self.device, generator=self.generator)

    def distinct(self, high: int, size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return ``size`` different integers from 0 to ``high - 1`` in random order, for slots and blocks."""
        return torch.randperm(high, device=self.device, generator=self.generator)[:size].to(dtype)

    def compiled(self, function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
        """Return the rival "torch.compile" of ``function``; none on a CPU, where compiling takes longest of all."""
        if not self.is_gpu or self.is_quick:
            return {}
        return {"torch.compile": torch.compile(function, dynamic=False)}
