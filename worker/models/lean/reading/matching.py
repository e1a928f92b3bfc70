"""Whether two tensors are the same, or were computed alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

# Of |difference| / |tensor|. What is compared went through few operations, and what is wrong differs by far more.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}

Guess = TypeVar("Guess")


def error_of(ours: Tensor, theirs: Tensor) -> float:
    """``|difference| / |theirs|``; infinite where shapes differ."""
    if ours.shape != theirs.shape:
        return math.inf
    error = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-12)
    return error.nan_to_num(torch.inf).item()


def tolerance_for(tensor: Tensor) -> float:
    return _TOLERANCES[tensor.dtype]


def same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Whether they are bit by bit alike: what one module makes is then what another is given, with nothing between.

    What is added to something far smaller is nearly the sum, so here nearness would not tell.
    """
    return ours is not None and theirs is not None and ours.shape == theirs.shape and torch.equal(ours, theirs)


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether they agree but for rounding."""
    return error_of(ours, theirs) <= tolerance_for(theirs)


def best(guesses: Iterable[Guess], compute: Callable[[Guess], Tensor], made: Tensor) -> Guess | None:
    """The guess by which ``compute`` comes closest to ``made``, the first of several; None if none comes close."""
    chosen, least = None, tolerance_for(made)
    for guess in guesses:
        error = error_of(compute(guess), made)
        if error < least:
            chosen, least = guess, error
    return chosen


def rows_of(tensor: Tensor) -> Tensor:
    """``[1, T, ...]`` as ``[T, ...]``."""
    return tensor[0] if tensor.dim() > 2 and tensor.shape[0] == 1 else tensor
