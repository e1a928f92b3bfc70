"""The choice among several ways to compute the same: the fastest of those whose results are right.

It is made when a model is loaded, on its own shapes. Two starts may choose differently, so ``--deterministic`` makes
no such choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Norm of the difference of a row over the norm of the row. Both ways round, sums of thousands of products once each.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# A way must take less than this share of the plain way's time, or noise would choose.
_MARGIN = 0.97

Run = Callable[[], Sequence[Tensor]]
# measure_us(call) returns the microseconds of ``call``.
MeasureUs = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Choice:
    """A choice and its reasons.

    Args:
        name: of the chosen way.
        us: times of the ways that are right, by name.
        refused: reasons of the other ways, by name.
    """

    name: str
    us: dict[str, float]
    refused: dict[str, str] = field(default_factory=dict)


def choose(plain: str, ways: Mapping[str, Run], measure_us: MeasureUs) -> Choice:
    """Return the fastest of ``ways`` whose results are those of ``plain``, or ``plain`` if it is hardly slower.

    Args:
        plain: name of the way whose results are right.
        ways: by name; each returns tensors ``[rows, ...]``. One that raises is not chosen: a library may be missing, or
            refuse the shapes.
    """
    try:
        expected = [tensor.clone() for tensor in ways[plain]()]
        us, refused = {plain: measure_us(ways[plain])}, dict[str, str]()
    except Exception as error:  # a start does not fail for want of a time
        return Choice(plain, {}, {plain: _sentence(error)})
    for name, run in ways.items():
        if name == plain:
            continue
        try:
            refusal = _difference(run(), expected)
            if refusal is None:
                us[name] = measure_us(run)
            else:
                refused[name] = refusal
        except Exception as error:  # any exception of a library
            refused[name] = _sentence(error)
    fastest = min(us, key=us.__getitem__)
    return Choice(fastest if us[fastest] < _MARGIN * us[plain] else plain, us, refused)


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _difference(results: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Return how ``results`` differ from ``expected`` by more than rounding; None if they do not."""
    forms = [[(tensor.shape, tensor.dtype) for tensor in tensors] for tensors in (results, expected)]
    if forms[0] != forms[1]:
        return "its results have another form"
    for actual, right in zip(results, expected, strict=True):
        wide = right.flatten(1).double()
        error = (actual.flatten(1).double() - wide).norm(dim=1) / wide.norm(dim=1).clamp(
            min=torch.finfo(right.dtype).tiny
        )
        largest = error.max().item() if len(error) else 0.0
        # A comparison with NaN is false.
        if not largest <= _TOLERANCES[right.dtype]:
            return f"its results differ by {largest:.2g}"
    return None
