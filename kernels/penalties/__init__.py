"""Repetition, presence and frequency penalties on logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import REFERENCE, KernelInputError, OnGpu, select
from . import reference

_IMPLEMENTATIONS = {REFERENCE: reference.penalize, "cuda": OnGpu(f"{__package__}.gpu", "penalize", (torch.float32,))}


def penalize(logits: Tensor, rows: Tensor, token_ids: Tensor, repetition: Tensor, deduction: Tensor) -> None:
    """Penalise ``E`` logits, in place.

    A logit above 0 is divided by its ``repetition``, any other is multiplied; then its ``deduction`` is subtracted. The
    caller counts the tokens to penalise, which are few compared to the vocabulary.

    Args:
        logits: ``[R, V]`` float32, any strides. **Mutated.** Each change is independent of the others.
        rows, token_ids: ``[E]`` int64, contiguous, within ``R`` and ``V``; no pair occurs twice.
        repetition, deduction: ``[E]`` float32, contiguous. All four are on the CPU or on the device of the logits.

    Raises:
        KernelInputError: a shape or dtype above does not hold.

    Cost: memory bound, ``32 * E`` bytes; from the CPU to a GPU additionally one copy of ``24 * E`` bytes.
    Source: Keskar et al. 2019 (arXiv:1909.05858) for repetition; the others are those of OpenAI's API.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32:
        raise KernelInputError(f"logits must be [R, V] float32, got {tuple(logits.shape)} {logits.dtype}")
    arguments = {"rows": rows, "token_ids": token_ids, "repetition": repetition, "deduction": deduction}
    for name, tensor in arguments.items():
        dtype = torch.int64 if name in ("rows", "token_ids") else torch.float32
        if tensor.shape != (len(rows),) or tensor.dtype != dtype or not tensor.is_contiguous():
            actual = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise KernelInputError(f"{name} must be contiguous [{len(rows)}] {dtype}, got {actual}")
    select(_IMPLEMENTATIONS, logits.device, logits.dtype)(logits, rows, token_ids, repetition, deduction)
