"""Recognize norms by their input and output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...plan import NormPlan
from ..layers.norms import make_norm
from .trace import ModuleCall, best, rows_of, same

_NAMES_OF_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "rms_norm_eps")
_USUAL_EPS = (1e-5, 1e-6)
# is_centred, is_wide, offset
_FORMS = ((False, False, 0.0), (False, True, 0.0), (False, True, 1.0), (True, True, 0.0), (True, True, 1.0))
# Small enough to make epsilon matter, for rows whose mean square is about one.
_FAINT = 1e-3


@torch.inference_mode()
def read_norm(call: ModuleCall) -> NormPlan | None:
    """Return the plan of ``call`` if it is a known norm; else None."""
    if not call.is_norm_read:
        call.norm, call.is_norm_read = _guess_norm(call), True
    return call.norm


def _guess_norm(call: ModuleCall) -> NormPlan | None:
    if call.input is None or call.output is None or call.input.shape != call.output.shape or not _may_be(call.module):
        return None
    inputs, size = call.input, call.input.shape[-1]
    guesses = [
        NormPlan(call.name, eps, size, is_centred=is_centred, is_wide=is_wide, offset=offset)
        for eps in eps_of(call.module)
        for is_centred, is_wide, offset in _FORMS
    ]
    faint = _made(call.module(inputs * _FAINT))

    def compute_norm(guess: NormPlan) -> Tensor:
        norm = make_norm(call.module, guess, inputs.device)
        return torch.stack((norm(inputs), norm(inputs * _FAINT)))

    return None if faint is None else best(guesses, compute_norm, torch.stack((call.output, faint)))


def eps_of(module: Any) -> list[float]:
    """Return the possible epsilons of a norm: the one that it declares, else the usual ones."""
    declared = next((getattr(module, name) for name in _NAMES_OF_EPS if hasattr(module, name)), None)
    return [declared] if isinstance(declared, float) else list(_USUAL_EPS)


def _made(result: Any) -> Tensor | None:
    return result if isinstance(result, Tensor) else None


def _may_be(module: nn.Module) -> bool:
    """Whether the module can be a norm: no children, and no parameters besides weight and bias."""
    if isinstance(module, nn.Linear | nn.Embedding | nn.Dropout) or next(module.children(), None) is not None:
        return False
    names = {name for name, _ in module.named_parameters(recurse=False)}
    return names <= {"weight", "bias"}


def norm_before(calls: list[ModuleCall], outputs: Tensor, inputs: Tensor) -> NormPlan | None:
    """Return the norm among ``calls`` with input ``inputs`` and output ``outputs``; None if there is none."""
    for call in calls:
        if call.input is None or call.output is None:
            continue
        if same(rows_of(call.output), outputs) and same(rows_of(call.input), inputs) and (plan := read_norm(call)):
            return plan
    return None


def norm_after(calls: list[ModuleCall], inputs: Tensor) -> tuple[NormPlan, Tensor] | None:
    """Return the norm among ``calls`` with input ``inputs``, and its output; None if there is none."""
    for call in calls:
        if call.input is not None and call.output is not None and same(rows_of(call.input), inputs):
            plan = read_norm(call)
            if plan is not None:
                return plan, rows_of(call.output)
    return None
