"""Compare tensors, and find the factors that a model multiplies by.

A factor is measured roughly and then taken exactly from the numbers that the model's configuration and modules hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from .....shared.errors import ModelLoadError

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


def known_numbers(module: nn.Module, config: PretrainedConfig, dtype: torch.dtype) -> list[float]:
    """1, and every number of the configuration and of ``module``, its reciprocal and its root; as they are, and as
    ``dtype`` rounds them."""
    found: dict[float, None] = {1.0: None}
    values: Any = [*vars(config).values(), *vars(module).values()]
    for value in values:
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            for number in (float(value), 1.0 / value, math.sqrt(value)):
                found[number] = None
                found[torch.tensor(number, dtype=dtype).item()] = None
    return list(found)


def factor_between(given: Tensor, made: Tensor, numbers: Iterable[float]) -> float | None:
    """The number by which ``given`` becomes ``made``; None if there is none."""
    return best(_near(given, made, numbers), lambda number: given * number, made)


def scale_of_addition(given: Tensor, added: Tensor, made: Tensor, numbers: Iterable[float]) -> float | None:
    """The number by which ``added`` is multiplied before ``given + added`` is ``made``; None if there is none."""
    near = _near(added, made.float() - given.float(), numbers, doubt=tolerance_for(made) * _size(made) / _size(added))
    return best(near, lambda number: given + (added if number == 1.0 else added * number), made)


def read_change(given: Tensor, made: Tensor, numbers: list[float]) -> tuple[float, float | None] | None:
    """The factor, and the cap if there is one, by which ``given`` becomes ``made``; None if there are none.

    A cap changes little numbers next to nothing, so whichever comes closest is what it is.
    """
    guesses: list[tuple[float, float | None]] = [(number, None) for number in _near(given, made, numbers)]
    guesses += [(1.0, number) for number in numbers if number > 1.0]

    def compute(guess: tuple[float, float | None]) -> Tensor:
        factor, cap = guess
        scaled = given if factor == 1.0 else given * factor
        return scaled if cap is None else torch.tanh(scaled / cap) * cap

    return best(guesses, compute, made)


def must(number: float | None, what: str) -> float:
    """``number``.

    Raises:
        ModelLoadError: there is none; says ``what`` was looked for.
    """
    if number is None:
        raise ModelLoadError(f"{what} is not what a known kind of layer makes it")
    return number


def _size(tensor: Tensor) -> float:
    return max(tensor.float().norm().item(), 1e-12)


def _near(given: Tensor, made: Tensor, numbers: Iterable[float], doubt: float = 0.0) -> Iterator[float]:
    """Those of ``numbers`` that are near to what ``made`` has of ``given``, or within ``doubt`` of it."""
    rows, others = given.double().flatten(), made.double().flatten()
    if rows.shape != others.shape:
        return
    measured = (rows @ others / (rows @ rows).clamp(min=1e-30)).item()
    for number in numbers:
        if abs(number - measured) <= 0.02 * abs(measured) + doubt:
            yield number
