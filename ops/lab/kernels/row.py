"""Check and time one case."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .roofline import Roofline
from .timing import Times, measure
from .tolerances import assert_close

_KERNEL = "own"


@dataclass(frozen=True)
class Row:
    """Result of a case. If the kernel raised or its result was wrong, ``error`` is set and the times are None.

    ``rivals_us`` has None for a rival that raised or whose result was wrong.
    """

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
        """Return the rate in GB/s for a memory-bound case, in TFLOP/s for a compute-bound one."""
        if self.us is None:
            return ""
        if roofline.is_memory_bound(self.num_bytes, self.num_flop):
            return f"{self.num_bytes / self.us * 1e-3:.0f} GB/s"
        return f"{self.num_flop / self.us * 1e-6:.1f} TFLOP/s"

    def share(self, roofline: Roofline) -> float | None:
        """Return the share of the roofline's rate. In small cases the launch alone keeps it low."""
        return None if self.us is None else roofline.bound_us(self.num_bytes, self.num_flop) / self.us

    def as_json(self, roofline: Roofline) -> dict[str, Any]:
        return {**asdict(self), "share": self.share(roofline)}


def measure_case(kernel: str, case: Case, device: torch.device, budget_s: float) -> Row:
    """Compare, then time. Errors are printed on standard error and stored in the row."""
    about = (kernel, case.shape, str(case.dtype).removeprefix("torch."), case.num_bytes, case.num_flop)
    truth: tuple[Tensor, ...] | None = None
    copies = tuple(tensor.clone() for tensor in case.inputs)
    times: dict[str, Times] = {}
    errors: dict[str, str] = {}
    for name, function in {_KERNEL: case.run, **case.rivals}.items():
        try:
            truth = truth or _as_tuple(case.truth(*(_widened(tensor) for tensor in case.inputs)))
            _check_results(function, case, truth)
            times[name] = measure(lambda function=function: function(*copies), device, budget_s)
        except Exception as error:  # a function that does not run on this device must not cost the other rows
            print(f"{kernel} {case.shape}, {name}:\n{traceback.format_exc()}", file=sys.stderr)
            errors[name] = describe_error(error)
    torch.compiler.reset()  # else later shapes exceed its recompilation limit, and it stops compiling
    rivals = {name: times[name].us if name in times else None for name in case.rivals}
    if _KERNEL in errors:
        return Row(*about, error=errors[_KERNEL], rivals_us=rivals)
    return Row(*about, us=times[_KERNEL].us, host_us=times[_KERNEL].host_us, rivals_us=rivals)


def describe_error(error: Exception) -> str:
    """Return the type of ``error`` and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _check_results(function: Callable[..., Any], case: Case, truth: tuple[Tensor, ...]) -> None:
    results = _as_tuple(function(*(tensor.clone() for tensor in case.inputs)))
    for actual, expected in zip(results, truth, strict=True):
        assert_close(actual, expected)


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()
