"""Which normalisation a module is, by what it makes of what it was given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...plan import NormPlan
from ..layers.norms import make_norm
from .matching import best, rows_of, same
from .trace import ModuleCall

_NAMES_OF_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "rms_norm_eps")
_USUAL_EPS = (1e-5, 1e-6)
# is_centred, is_wide, offset
_FORMS = ((False, False, 0.0), (False, True, 0.0), (False, True, 1.0), (True, True, 0.0), (True, True, 1.0))
# Small enough that the epsilon counts, for rows whose mean square is about one.
_FAINT = 1e-3


@torch.inference_mode()
def read_norm(call: ModuleCall) -> NormPlan | None:
    """The plan of the normalisation that ``call`` is; None if it is none that is known."""
    if not call.is_norm_read:
        call.norm, call.is_norm_read = _guess_norm(call), True
    return call.norm


def _guess_norm(call: ModuleCall) -> NormPlan | None:
    if call.given is None or call.made is None or call.given.shape != call.made.shape or not _may_be(call.module):
        return None
    given, size = call.given, call.given.shape[-1]
    guesses = [
        NormPlan(call.name, eps, size, is_centred=is_centred, is_wide=is_wide, offset=offset)
        for eps in eps_of(call.module)
        for is_centred, is_wide, offset in _FORMS
    ]
    faint = _made(call.module(given * _FAINT))

    def compute(guess: NormPlan) -> Tensor:
        norm = make_norm(call.module, guess, given.device)
        return torch.stack((norm(given), norm(given * _FAINT)))

    return None if faint is None else best(guesses, compute, torch.stack((call.made, faint)))


def eps_of(module: Any) -> list[float]:
    """What a normalisation may add to the mean of squares: what it says itself, else the usual ones."""
    own = next((getattr(module, name) for name in _NAMES_OF_EPS if hasattr(module, name)), None)
    return [own] if isinstance(own, float) else list(_USUAL_EPS)


def _made(result: Any) -> Tensor | None:
    return result if isinstance(result, Tensor) else None


def _may_be(module: nn.Module) -> bool:
    """It has one weight, or none, and the rest of it is no larger."""
    if isinstance(module, nn.Linear | nn.Embedding | nn.Dropout) or next(module.children(), None) is not None:
        return False
    names = {name for name, _ in module.named_parameters(recurse=False)}
    return names <= {"weight", "bias"}


def norm_before(calls: list[ModuleCall], made: Tensor, given: Tensor) -> NormPlan | None:
    """The normalisation among ``calls`` that makes ``made`` of ``given``; None if there is none."""
    for call in calls:
        if call.given is None or call.made is None:
            continue
        if same(rows_of(call.made), made) and same(rows_of(call.given), given) and (plan := read_norm(call)):
            return plan
    return None


def norm_after(calls: list[ModuleCall], given: Tensor) -> tuple[NormPlan, Tensor] | None:
    """The normalisation that is given ``given``, and what it makes of it; None if there is none."""
    for call in calls:
        if call.given is not None and call.made is not None and same(rows_of(call.given), given):
            plan = read_norm(call)
            if plan is not None:
                return plan, rows_of(call.made)
    return None
