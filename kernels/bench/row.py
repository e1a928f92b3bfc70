"""Judges and times one case."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..tolerances import assert_close
from .case import Case
from .roofline import Roofline
from .timing import Times, measure

_OWN = "own"


@dataclass(frozen=True)
class Row:
    """What was found of a case. ``error`` is set, and the times are missing, where the result was wrong or the call
    raised; ``rivals_us`` has None for such rivals."""

    kernel: str
    shape: str
    dtype: str
    num_bytes: int
    num_flop: int
    us: float | None = None
    host_us: float | None = None
    error: str | None = None
    rivals_us: dict[str, float | None] | None = None

    def rate(self, roofline: Roofline) -> str:
        """By what bounds it: GB/s or TFLOP/s."""
        if self.us is None:
            return ""
        if roofline.is_memory_bound(self.num_bytes, self.num_flop):
            return f"{self.num_bytes / self.us * 1e-3:.0f} GB/s"
        return f"{self.num_flop / self.us * 1e-6:.1f} TFLOP/s"

    def share(self, roofline: Roofline) -> float | None:
        """Of the roofline's rate; small cases stay below for the launch alone."""
        return None if self.us is None else roofline.bound_us(self.num_bytes, self.num_flop) / self.us

    def as_json(self, roofline: Roofline) -> dict[str, Any]:
        return {**asdict(self), "share": self.share(roofline)}


def measure_case(kernel: str, case: Case, device: torch.device, budget_s: float) -> Row:
    """Compare, then time; what goes wrong is told on standard error and in the row."""
    about = (kernel, case.shape, str(case.dtype).removeprefix("torch."), case.num_bytes, case.num_flop)
    truth: tuple[Tensor, ...] | None = None
    copies = tuple(tensor.clone() for tensor in case.inputs)
    times: dict[str, Times] = {}
    errors: dict[str, str] = {}
    for name, function in {_OWN: case.run, **case.rivals}.items():
        try:
            truth = truth or _as_tuple(case.truth(*(_widened(tensor) for tensor in case.inputs)))
            _check(function, case, truth)
            times[name] = measure(lambda function=function: function(*copies), device, budget_s)
        except Exception as error:  # what does not run on this device must not cost the other rows
            print(f"{kernel} {case.shape}, {name}:\n{traceback.format_exc()}", file=sys.stderr)
            errors[name] = describe_error(error)
    torch.compiler.reset()  # else the next shapes reach its limit of recompilations, and it stops compiling
    rivals = {name: times[name].us if name in times else None for name in case.rivals}
    if _OWN in errors:
        return Row(*about, error=errors[_OWN], rivals_us=rivals)
    return Row(*about, us=times[_OWN].us, host_us=times[_OWN].host_us, rivals_us=rivals)


def describe_error(error: Exception) -> str:
    """Its type and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _check(function: Callable[..., Any], case: Case, truth: tuple[Tensor, ...]) -> None:
    found = _as_tuple(function(*(tensor.clone() for tensor in case.inputs)))
    for actual, expected in zip(found, truth, strict=True):
        assert_close(actual, expected)


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()
