"""One row of the benchmark, and where it is measured."""

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

    Functions take ``inputs`` and return a tensor or a tuple of them. For each comparison they get copies, so they may
    write over them; what they only read and what is too large to copy they may close over.

    Args:
        shape: in the letters of ``kernels/__init__.py``, e.g. ``"T=64 E=4096"``; with the name of the operation in
            front where a package has several.
        dtype: of the inputs, for the row.
        inputs: contiguous tensors. A slice of a larger tensor is cut inside of ``run``.
        run: the kernel's wrapper.
        truth: the reference; gets the floating inputs as float64.
        rivals: torch's own ways to the same result, by name.
        num_bytes: read and written, each once.
        num_flop: multiplications and additions of the products; 0 for what only moves memory.
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
    """Where cases are measured. Random numbers follow from a fixed seed.

    Args:
        device: of the tensors.
        is_quick: the fewest cases that still run every kernel.
    """

    def __init__(self, device: torch.device, *, is_quick: bool = False) -> None:
        self.device = device
        self.is_quick = is_quick
        self.generator = torch.Generator(device).manual_seed(SEED)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def choose(self, *, on_gpu: Sequence[T], on_cpu: Sequence[T]) -> list[T]:
        """Those for this device; the last alone in a quick run."""
        chosen = list(on_gpu if self.is_gpu else on_cpu)
        return chosen[-1:] if self.is_quick else chosen

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normally distributed numbers."""
        return torch.randn(*shape, dtype=torch.float32, device=self.device, generator=self.generator).to(dtype)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """From 0 to ``high - 1``."""
        return torch.randint(high, shape, dtype=dtype, device=self.device, generator=self.generator)

    def distinct(self, high: int, size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """``size`` different integers from 0 to ``high - 1``, in no order: slots, blocks."""
        return torch.randperm(high, device=self.device, generator=self.generator)[:size].to(dtype)

    def compiled(self, function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
        """The rival "torch.compile" of ``function``; none on a CPU, where compiling takes longer than all the rest."""
        if not self.is_gpu or self.is_quick:
            return {}
        return {"torch.compile": torch.compile(function, dynamic=False)}
