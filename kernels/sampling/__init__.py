"""Choose tokens from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import REFERENCE, KernelInputError, OnGpu, select
from . import native, reference
from .draws import DTYPES, Draws

__all__ = ["DTYPES", "Draws", "argmax", "is_row_independent", "sample"]

_GPU = f"{__package__}.gpu"
_ARGMAX = {REFERENCE: reference.argmax, "cpu": native.argmax, "cuda": OnGpu(_GPU, "argmax")}
_SAMPLE = {REFERENCE: reference.sample, "cpu": native.sample, "cuda": OnGpu(_GPU, "sample")}


def argmax(logits: Tensor) -> Tensor:
    """Return the most probable token of each row; of equally probable tokens the first.

    Args:
        logits: ``[R, V]`` of any float dtype; rows contiguous, or they are copied.

    Returns:
        ``[R]`` int64, on the device of ``logits``.

    Raises:
        KernelInputError: the shape above does not hold.

    Cost: memory bound, ``R * V * itemsize`` bytes.
    """
    _check_logits(logits)
    return select(_ARGMAX, logits.device, logits.dtype)(logits)


def sample(logits: Tensor, draws: Draws) -> Tensor:
    """Return one token per row, drawn as ``draws`` says; a row's token does not depend on the other rows.

    Args:
        logits: ``[R, V]`` of any float dtype; rows contiguous, or they are copied. **May be mutated.** A token at
            minus infinity is never drawn, unless the whole row is at minus infinity.
        draws: on the CPU, or on the device of the logits.

    Returns:
        ``[R]`` int64, on the device of ``logits``. The same on every device, except for the order of equal logits and
        for rows whose uniform number is within the rounding error of a float sum from the edge of a token.

    Raises:
        KernelInputError: a shape or dtype above, or of ``draws``, does not hold.

    Cost: one or two passes over the logits. If ``top_p`` keeps more than 64 tokens, about 15 passes over the
    probabilities (on a GPU 12, by one program, and up to 36 if ``top_k`` exceeds a few hundred).
    """
    _check_logits(logits)
    for name, dtype in DTYPES.items():
        column = getattr(draws, name)
        is_readable = column.is_contiguous() and column.device in (torch.device("cpu"), logits.device)
        if column.shape != logits.shape[:1] or column.dtype != dtype or not is_readable:
            raise KernelInputError(
                f"{name} must be contiguous [{len(logits)}] {dtype} on the CPU or the device of the logits, got "
                f"{tuple(column.shape)} {column.dtype} on {column.device}"
            )
    return select(_SAMPLE, logits.device, logits.dtype)(logits, draws)


def is_row_independent(logits: Tensor, top_k: Tensor) -> bool:
    """Return whether the tokens of ``argmax`` and ``sample`` depend on no other row, down to the bits of the logits.

    Args:
        logits, top_k: as for ``sample``.
    """
    return logits.device.type == "cpu" and native.is_row_independent(logits, top_k)


def _check_logits(logits: Tensor) -> None:
    if logits.ndim != 2 or logits.shape[1] < 1 or not logits.is_floating_point():
        raise KernelInputError(f"logits must be [R, V] of a float dtype, got {tuple(logits.shape)} {logits.dtype}")
