"""Choosing tokens from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import REFERENCE, OnGpu, select
from ..errors import KernelInputError
from . import native, reference
from .draws import Draws

__all__ = ["Draws", "argmax", "sample", "takes_rows_alone"]

_GPU = f"{__package__}.gpu"
_ARGMAX = {REFERENCE: reference.argmax, "cpu": native.argmax, "cuda": OnGpu(_GPU, "argmax")}
_SAMPLE = {REFERENCE: reference.sample, "cpu": native.sample, "cuda": OnGpu(_GPU, "sample")}
_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "uniforms": torch.float64,
}


def argmax(logits: Tensor) -> Tensor:
    """Return the most probable token of each row, of equally probable ones the first.

    Args:
        logits: ``[R, V]`` of any float dtype; rows contiguous, else they are copied.

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
        logits: ``[R, V]`` of any float dtype; rows contiguous, else they are copied. **May be mutated.** A token at
            minus infinity is never drawn, unless the whole row is.
        draws: on the CPU, or where the logits are.

    Returns:
        ``[R]`` int64, on the device of ``logits``. The same on every device, but for rows whose number lies within the
        rounding of a float sum from the edge of a token, and the order of equal logits.

    Raises:
        KernelInputError: a shape or dtype above, or of ``draws``, does not hold.

    Cost: one or two passes over the logits; where ``top_p`` keeps more than 64 tokens, about 15 over the probabilities
    (on a GPU 12, by one program, and up to 36 where ``top_k`` is above some hundred).
    """
    _check_logits(logits)
    for name, dtype in _DTYPES.items():
        given = getattr(draws, name)
        is_within_reach = given.device.type == "cpu" or given.device == logits.device
        if given.shape != logits.shape[:1] or given.dtype != dtype or not (is_within_reach and given.is_contiguous()):
            found = f"{tuple(given.shape)} {given.dtype} on {given.device}"
            where = "the CPU or the device of the logits"
            raise KernelInputError(f"{name} must be contiguous [{len(logits)}] {dtype} on {where}, got {found}")
    return select(_SAMPLE, logits.device, logits.dtype)(logits, draws)


def takes_rows_alone(logits: Tensor, top_k: Tensor) -> bool:
    """Whether ``argmax`` and ``sample`` give a row the same token, to the bit of its logits, in any company.

    Args:
        logits, top_k: as for ``sample``.
    """
    return logits.device.type == "cpu" and native.takes_rows_alone(logits, top_k)


def _check_logits(logits: Tensor) -> None:
    if logits.ndim != 2 or logits.shape[1] < 1 or not logits.is_floating_point():
        raise KernelInputError(f"logits must be [R, V] of a float dtype, got {tuple(logits.shape)} {logits.dtype}")
