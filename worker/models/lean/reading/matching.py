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

# Limits of |difference| / |tensor|. Tensors that match went through few operations, and wrong ones differ by far more.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}

Guess = TypeVar("Guess")


def error_of(ours: Tensor, theirs: Tensor) -> float:
    """Return ``|difference| / |theirs|``; infinite if shapes differ."""
    if ours.shape != theirs.shape:
        return math.inf
    error = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-12)
    return error.nan_to_num(torch.inf).item()


def tolerance_for(tensor: Tensor) -> float:
    return _TOLERANCES[tensor.dtype]


def same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Whether two tensors are equal bit by bit, which shows that one module's output is another's input.

    A sum with something far smaller is close to it, so closeness would show nothing here.
    """
    return ours is not None and theirs is not None and ours.shape == theirs.shape and torch.equal(ours, theirs)


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors agree except for rounding."""
    return error_of(ours, theirs) <= tolerance_for(theirs)


def best(guesses: Iterable[Guess], compute: Callable[[Guess], Tensor], output: Tensor) -> Guess | None:
    """Return the guess for which ``compute`` is closest to ``output``, the first of several; None if none is close."""
    chosen, least = None, tolerance_for(output)
    for guess in guesses:
        error = error_of(compute(guess), output)
        if error < least:
            chosen, least = guess, error
    return chosen


def rows_of(tensor: Tensor) -> Tensor:
    """Return ``[1, T, ...]`` as ``[T, ...]``."""
    return tensor[0] if tensor.dim() > 2 and tensor.shape[0] == 1 else tensor


def known_numbers(module: nn.Module, config: PretrainedConfig, dtype: torch.dtype) -> list[float]:
    """Return 1, and each number of the configuration and of ``module``, with its reciprocal and root, exact and rounded
    to ``dtype``.
    """
    numbers: dict[float, None] = {1.0: None}
    values: Any = [*vars(config).values(), *vars(module).values()]
    for value in values:
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            for number in (float(value), 1.0 / value, math.sqrt(value)):
                numbers[number] = None
                numbers[torch.tensor(number, dtype=dtype).item()] = None
    return list(numbers)


def factor_between(inputs: Tensor, outputs: Tensor, numbers: Iterable[float]) -> float | None:
    """Return the factor from ``inputs`` to ``outputs``; None if no number is it."""
    return best(_near(inputs, outputs, numbers), lambda number: inputs * number, outputs)


def scale_of_addition(inputs: Tensor, added: Tensor, outputs: Tensor, numbers: Iterable[float]) -> float | None:
    """Return the factor on ``added`` for which ``inputs`` + ``added`` is ``outputs``; None if no number is it."""
    near = _near(
        added, outputs.float() - inputs.float(), numbers, doubt=tolerance_for(outputs) * _size(outputs) / _size(added)
    )
    return best(near, lambda number: inputs + (added if number == 1.0 else added * number), outputs)


def read_change(inputs: Tensor, outputs: Tensor, numbers: list[float]) -> tuple[float, float | None] | None:
    """Return the factor and the cap (None for none) that turn ``inputs`` into ``outputs``; None if there are none.

    A cap hardly changes small numbers, so the closest guess is taken.
    """
    guesses: list[tuple[float, float | None]] = [(number, None) for number in _near(inputs, outputs, numbers)]
    guesses += [(1.0, number) for number in numbers if number > 1.0]

    def compute(guess: tuple[float, float | None]) -> Tensor:
        factor, cap = guess
        scaled = inputs if factor == 1.0 else inputs * factor
        return scaled if cap is None else torch.tanh(scaled / cap) * cap

    return best(guesses, compute, outputs)


def must(number: float | None, what: str) -> float:
    """Return ``number``.

    Raises:
        ModelLoadError: it is None; the message names ``what``.
    """
    if number is None:
        raise ModelLoadError(f"{what} is not what a known kind of layer makes it")
    return number


def _size(tensor: Tensor) -> float:
    return max(tensor.float().norm().item(), 1e-12)


def _near(inputs: Tensor, outputs: Tensor, numbers: Iterable[float], doubt: float = 0.0) -> Iterator[float]:
    """Yield the ``numbers`` that are close to the measured factor from ``inputs`` to ``outputs``, or within ``doubt``
    of it.
    """
    rows, targets = inputs.double().flatten(), outputs.double().flatten()
    if rows.shape != targets.shape:
        return
    measured = (rows @ targets / (rows @ rows).clamp(min=1e-30)).item()
    for number in numbers:
        if abs(number - measured) <= 0.02 * abs(measured) + doubt:
            yield number
