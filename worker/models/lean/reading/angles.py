"""The ways in which a model makes the angles of its rotary embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .....shared.errors import ModelLoadError
from ..plan import AnglesPlan
from ..rotation import angles_of, as_halves
from .attention import AnglesSource
from .matching import close, rows_of
from .trace import ModuleCall, Trace, some


def sources_of(call: ModuleCall, trace: Trace) -> list[AnglesSource]:
    """The ways to read what ``call`` makes as angles of ``trace.positions``; none if it makes anything else."""
    found = _as_angles(call, trace.num_tokens)
    if found is None:
        return []
    behind = [value for value in call.arguments[1:] if not isinstance(value, Tensor)]
    options = {name: value for name, value in call.options.items() if not isinstance(value, Tensor)}
    given = AnglesPlan(call.name, tuple(behind), tuple(options.items()))
    sources = []
    for stride, repeats in ((1, True), (2, True), (1, False)):
        plan = AnglesPlan(given.name, given.arguments, given.options, stride, repeats)
        cos, sin = (as_halves(angles, plan) for angles in found)
        if _is_read_well(rows_of(found[0]), cos, plan) and _is_alone(call, plan, trace, cos):
            sources.append(AnglesSource(plan, cos, sin))
    return sources


def _as_angles(call: ModuleCall, num_tokens: int) -> tuple[Tensor, Tensor] | None:
    results: Any = call.results
    if not isinstance(results, tuple) or len(results) != 2 or not all(isinstance(one, Tensor) for one in results):
        return None
    cos, sin = results
    is_of_tokens = cos.shape == sin.shape and cos.dim() in (2, 3) and cos.shape[-2] == num_tokens
    if not is_of_tokens or not bool(((cos.float() ** 2 + sin.float() ** 2).std(-1) < 0.05).all()):
        return None
    return (cos, sin) if cos.dim() == 2 or cos.shape[0] == 1 else None


def _is_read_well(made: Tensor, cos: Tensor, plan: AnglesPlan) -> bool:
    """Whether columns that are taken for one angle are alike."""
    if not plan.repeats:
        return True
    if plan.stride == 2:
        return torch.equal(made[:, ::2], made[:, 1::2])
    first, second = made.chunk(2, dim=1)
    return torch.equal(first, second)


def _is_alone(call: ModuleCall, plan: AnglesPlan, trace: Trace, cos: Tensor) -> bool:
    """Whether a token's angles are its own, whatever the longest request of a step is.

    Raises:
        ModelLoadError: they are not.
    """
    try:
        alone, _ = angles_of(call.module, plan, some(call.given), trace.first_positions)
    except Exception:  # it takes something else than hidden states and positions, and so is no source of angles
        return False
    if not close(alone, cos[: len(alone)]):
        raise ModelLoadError(
            "the angles of its rotary embedding follow the longest request of a step; with a max_model_len that needs "
            "no scaling they would not"
        )
    return True
